"""YAML with positions, within bounds of size and depth, and diagnostics that point into it."""
