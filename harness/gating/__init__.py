"""The CI gate: what can be said of a run with confidence, against limits and baselines."""
