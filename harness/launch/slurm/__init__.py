"""Nodes of a Slurm allocation: commands to Slurm and their answers."""
