"""server.sql"""
