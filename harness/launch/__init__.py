"""What a launcher offers an arm, and its parts: links, nodes, containers, Slurm. The launchers
themselves are in ``harness.launchers``.
"""
