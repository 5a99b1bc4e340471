"""Saving and restoring checkpoints: composable parts, one file each.

``chunks``: what a rank holds; ``part``: writing it, with ``delta`` leaving out what is on disk
already; ``sharded``: parts of several ranks become one checkpoint; ``background``: writing from a
snapshot while training goes on; ``reading``: verified restore, whatever the number of ranks that
wrote it.
"""
