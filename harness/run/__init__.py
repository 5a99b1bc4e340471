"""A whole run: cells, repeats and arms, the orchestrator of one arm, and every way out."""
