"""This machine: processes, control of its engines and Slurm, and where files of a run lie."""
