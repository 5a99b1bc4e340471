"""Tests of ``harness/run``."""
