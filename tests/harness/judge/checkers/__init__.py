"""Tests of ``harness/judge/checkers``."""
