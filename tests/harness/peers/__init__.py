"""Tests of ``harness/compare``."""
