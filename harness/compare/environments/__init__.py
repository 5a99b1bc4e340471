"""Recovery stacks as a comparison needs them: their software in environments of its own, and their
tuned options.
"""
