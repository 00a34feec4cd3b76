"""server.fsck.main"""
