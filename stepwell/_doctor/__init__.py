"""The checks of `stepwell doctor`: each is one query, which is also what a finding shows."""
