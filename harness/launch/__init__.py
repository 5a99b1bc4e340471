"""What a launcher offers an arm, and what is behind it: links, nodes, containers, Slurm. The kinds:
``harness.launchers``."""
