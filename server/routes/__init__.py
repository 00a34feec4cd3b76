"""HTTP: one file per resource. A file contains its transactions where they are a few statements.

A new route also needs its scope in auth.py:RULES, a message, a client method and a row in
docs/http.md.
"""
