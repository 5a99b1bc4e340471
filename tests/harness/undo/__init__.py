"""Tests of ``harness/undo``."""
