"""A simulated cluster: clock, processes, groups and ranks that behave as the real ones do, without any of them. No torch."""
