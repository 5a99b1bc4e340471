"""Fault kinds, one file each; the module name is the kind in a scenario."""
