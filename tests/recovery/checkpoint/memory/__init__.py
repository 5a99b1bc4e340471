"""Tests of ``recovery/checkpoint/memory``."""
