"""Tests of ``recovery/detection``."""
