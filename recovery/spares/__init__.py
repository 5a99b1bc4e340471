"""Spares that follow the job: what a rank sends them of each step, and what they make of it."""
