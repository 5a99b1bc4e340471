"""Tests of ``harness/judge/record``."""
