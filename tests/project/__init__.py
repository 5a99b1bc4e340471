"""Tests of the house itself: layers, names, pages."""
