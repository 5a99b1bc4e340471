"""Tests of ``recovery/data``."""
