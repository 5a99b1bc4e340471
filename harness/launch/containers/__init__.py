"""Nodes as containers on this machine: the engine, images, the run's network, and their cleanup."""
