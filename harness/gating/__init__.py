"""The gate of continuous integration: what may be said of a run with confidence, against limits and
baselines.
"""
