"""Tests of ``harness/judge/measure``."""
