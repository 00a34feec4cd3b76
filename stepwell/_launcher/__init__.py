"""The parts of `stepwell launcher`: the launch policy (rules), processes (children), the loop."""
