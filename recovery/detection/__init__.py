"""Distinguishes a hung rank from those that wait for it. Pure."""
