"""Tests of ``harness/host``."""
