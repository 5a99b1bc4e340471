"""Tests of ``recovery/process``."""
