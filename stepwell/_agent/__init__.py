"""The parts of `stepwell agent`: what a launch may ask for (rules), what was started (children)."""
