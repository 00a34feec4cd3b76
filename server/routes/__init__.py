"""HTTP: one thin file per resource."""
