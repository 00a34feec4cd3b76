"""Parts of `stepwell launcher`: what a launch may set, its processes, its record, the loop."""
