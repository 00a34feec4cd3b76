"""HTTP: one file per resource. A file contains its transactions where they are a few statements.

A new route also needs its right in rights.py:RIGHTS, a message, a client method and a row in
docs/reference/http.md; one that changes something writes the audit log (index/db.py).
"""
