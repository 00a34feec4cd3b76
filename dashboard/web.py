"""What `stepwell dash` runs: the pages of app.py, and the route that keeps a browser signed in.

`streamlit run dashboard/app.py` has the pages only: a login ends with its tab there.
"""

from __future__ import annotations

import streamlit as st

from dashboard import sessions

app = st.App("app.py", routes=[sessions.ROUTE])
