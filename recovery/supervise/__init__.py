"""The supervisor: the life of a failure from detection to the next generation."""
