"""Beacon and points for training frameworks, one file each; importing this imports none of them."""
