"""Tests of ``chaos``."""
