"""Tests of ``harness/launch``."""
