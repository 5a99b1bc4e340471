"""Checkers of faults: whether each one landed, was detected, blamed correctly and contained."""
