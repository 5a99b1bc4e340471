"""Measurements behind the figures in docs/performance.md; run by `make bench`, never part of the
tests.
"""
