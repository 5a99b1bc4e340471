"""Tests of ``recovery/supervise``."""
