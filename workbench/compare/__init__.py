"""The parts of `stepwell compare`: its jobs and their order, the table, the pictures."""
