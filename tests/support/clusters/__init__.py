"""Nodes, containers, Slurm and long runs for tests."""
