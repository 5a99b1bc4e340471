"""Tests of ``harness/preflight``."""
