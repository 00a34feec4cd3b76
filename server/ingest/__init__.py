"""server.ingest"""
