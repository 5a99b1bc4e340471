"""Several recovery stacks under the same faults with the same seeds: what is played, kept, and
computed from it.
"""
