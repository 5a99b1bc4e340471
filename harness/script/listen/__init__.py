"""Reads a command's output and beacon, and interprets them."""
