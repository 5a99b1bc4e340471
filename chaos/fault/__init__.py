"""Base class of faults, the targets they act on, and the evidence and consequences to check
afterwards. The fault kinds are in ``chaos.faults``.
"""
