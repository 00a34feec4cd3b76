"""`stepwell export`: a selection out of the service, into files that other tools read."""
