"""Checkpoint directories: names, manifests, verification, who may write, what is kept. No torch
here.
"""
