"""This machine: processes, access to its engines and Slurm, and the layout of run directories."""
