"""Tests of ``harness/script/processes``."""
