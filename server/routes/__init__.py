"""HTTP: one file per resource. A route parses, calls one function, and returns a message;
server/registry and the other parts of the service read and write the index.

A new route also needs its right in rights.py:RIGHTS, a message, a client method and a row in
docs/reference/http.md; one that changes something writes the audit log (index/db.py).
"""
