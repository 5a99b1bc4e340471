"""Checkers of faults: whether each landed, was noticed, blamed and contained."""
