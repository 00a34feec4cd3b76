"""Looking and managing: Streamlit pages over the service, and nothing that the service cannot say."""
