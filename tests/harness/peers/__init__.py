"""Tests of ``harness/peers``."""
