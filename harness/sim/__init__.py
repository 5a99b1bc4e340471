"""A simulated cluster: clock, processes, groups and ranks that behave like real ones. Without
torch.
"""
