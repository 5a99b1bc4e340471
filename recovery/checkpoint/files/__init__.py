"""Checkpoint directories: names, manifests, verification, write access, retention. No torch
here.
"""
