"""Tests of ``chaos/faults``."""
