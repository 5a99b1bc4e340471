"""Tests of ``chaos/loading``."""
