"""Measurements behind the figures in docs/performance.md; run by `make bench`, not by the tests."""
