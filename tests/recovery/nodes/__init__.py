"""Tests of ``recovery/nodes``."""
