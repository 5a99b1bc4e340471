"""Tests of ``harness/judge``."""
