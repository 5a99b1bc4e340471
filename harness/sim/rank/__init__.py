"""A simulated rank: its steps, its state, its saves, and the effects of faults on it."""
