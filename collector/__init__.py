"""Acting: plays environments with published policies and sends what happened to the service."""
