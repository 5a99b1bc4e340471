"""The world of simulated ranks: clock, processes, groups, links, storage."""
