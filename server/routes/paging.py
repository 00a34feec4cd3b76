"""How lists of the registry are paged: newest first, the cursor is the last row's number."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

Limit = Annotated[int, Query(ge=1, le=1000, description="rows of this page")]
Cursor = Annotated[int | None, Query(ge=0, lt=2**63, description="`next` of the page before")]
