"""Tests of ``harness/inject``."""
