"""Recovery stacks that a comparison drives, ours and others', one file each: how each trains the
same job.
"""
