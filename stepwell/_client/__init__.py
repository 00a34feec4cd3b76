"""The parts of `stepwell.Client`, one file per group of routes. Import `Client` from `stepwell`."""
