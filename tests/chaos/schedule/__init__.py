"""Tests of ``chaos/schedule``."""
