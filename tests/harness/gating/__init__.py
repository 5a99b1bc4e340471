"""Tests of ``harness/gating``."""
