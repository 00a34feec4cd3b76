"""server.imports"""
