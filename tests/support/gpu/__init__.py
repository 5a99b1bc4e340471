"""Ranks of tests that need a GPU."""
