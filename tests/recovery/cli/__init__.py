"""Tests of ``recovery/cli``."""
