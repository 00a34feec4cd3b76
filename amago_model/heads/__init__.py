"""What reads a state vector: actor and its distributions, critics, PopArt."""
