"""The parts of `stepwell demo`; the story is in stepwell/demo.py."""
