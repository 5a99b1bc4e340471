"""Signals of a place that is about to fail, and what to make of them."""
