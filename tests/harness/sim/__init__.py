"""Tests of ``harness/sim``."""
