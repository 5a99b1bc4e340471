"""Tests of ``chaos/events``."""
