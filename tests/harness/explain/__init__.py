"""Tests of ``harness/explain``."""
