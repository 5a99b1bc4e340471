"""Tests of harness/attribute and the diagnosis it examines."""
