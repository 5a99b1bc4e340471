"""Tests of ``harness/arm``."""
