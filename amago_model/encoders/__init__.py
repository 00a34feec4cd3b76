"""From observations to state vectors: timestep encoders, then trajectory encoders (the memory)."""
