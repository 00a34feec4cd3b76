"""What `stepwell dash` runs: the pages of app.py, the guard before all of them, and the route that
keeps a browser signed in.

`streamlit run dashboard/app.py` has the pages only: a login ends with its tab there, and Streamlit
itself guards the websocket, for the names in .streamlit/config.toml.
"""

from __future__ import annotations

import streamlit as st
from starlette.middleware import Middleware

from dashboard import sessions
from dashboard.host_guard import HostGuard

app = st.App(
    "app.py",
    routes=[sessions.ROUTE],
    middleware=[Middleware(HostGuard, address=st.get_option("server.address") or "")],
)
