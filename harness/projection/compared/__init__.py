"""Stored runs beside the projections of their own jobs."""
