"""Recovery stacks of a comparison, ours and others', one file each: how each trains the
common job.
"""
