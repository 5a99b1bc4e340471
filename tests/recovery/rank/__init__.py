"""Tests of ``recovery/rank``."""
