"""Tests of ``harness/rank``."""
