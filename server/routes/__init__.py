"""server.routes"""
