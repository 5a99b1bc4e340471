"""Tests of ``recovery/collectives``."""
