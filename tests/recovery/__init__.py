"""Tests of ``recovery``."""
