"""Tests of ``reports``."""
