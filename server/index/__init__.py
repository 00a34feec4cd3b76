"""server.index"""
