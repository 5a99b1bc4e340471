"""Nodes of a Slurm allocation: what Slurm is asked, and told."""
