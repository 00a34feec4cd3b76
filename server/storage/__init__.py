"""server.storage"""
