"""Nodes that are containers of an engine on this machine: the engine, images, the run's network,
and their end.
"""
