"""The common job as training scripts, one for each stack's documented API; run in the stack's own
environment.
"""
