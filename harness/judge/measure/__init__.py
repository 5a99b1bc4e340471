"""Metrics: what a fault cost, where the time went, and what a few values can prove."""
