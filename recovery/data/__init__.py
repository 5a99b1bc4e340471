"""Which samples a step trains on, and how they are loaded."""
