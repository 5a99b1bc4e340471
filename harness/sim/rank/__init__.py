"""A simulated rank: its steps, its state, its saves, and what faults do to it."""
