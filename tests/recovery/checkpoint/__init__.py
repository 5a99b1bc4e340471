"""Tests of ``recovery/checkpoint``."""
