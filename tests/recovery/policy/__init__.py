"""Tests of ``recovery/policy``."""
