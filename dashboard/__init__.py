"""The dashboard: Streamlit pages that show and manage data of the service through its API."""
