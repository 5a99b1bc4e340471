"""Tests of ``harness/script``."""
