"""server.maintenance"""
