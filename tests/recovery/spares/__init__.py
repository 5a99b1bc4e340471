"""Spares that follow the job."""
