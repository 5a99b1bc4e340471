"""Tests of ``recovery/transport``."""
