"""server.snapshots.service"""
