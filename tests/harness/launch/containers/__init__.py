"""Tests of ``harness/launch/containers``."""
