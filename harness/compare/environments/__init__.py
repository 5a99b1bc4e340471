"""Recovery stacks for a comparison: their software in separate environments, and their tuned
options.
"""
