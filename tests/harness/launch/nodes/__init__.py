"""Tests of ``harness/launch/nodes``."""
