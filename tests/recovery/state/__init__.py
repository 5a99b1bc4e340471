"""Tests of ``recovery/state``."""
