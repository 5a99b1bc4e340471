"""Tests of ``harness``."""
