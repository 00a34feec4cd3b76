"""server.upkeep"""
