"""Tests of ``harness/fuzz``."""
