"""One file per page; each exports `show()`, a function that draws it."""
