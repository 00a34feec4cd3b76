"""Looking and managing: Streamlit pages over the service; they say nothing that it cannot say."""
