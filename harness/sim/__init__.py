"""A simulated cluster: clock, processes, groups and ranks that behave as the real ones do. No
torch.
"""
