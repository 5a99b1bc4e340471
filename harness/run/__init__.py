"""A whole run: cells, repeats and arms, the orchestrator of one arm, and how a run ends or is
healed.
"""
