"""``recovery.run``: its options, where its processes live, and the supervisor of one script."""
