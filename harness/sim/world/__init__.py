"""What simulated ranks live in: clock, processes, groups, links, storage."""
