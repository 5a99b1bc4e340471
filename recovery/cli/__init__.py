"""``recovery.run``: its options, where its processes run, and the supervisor of one script."""
