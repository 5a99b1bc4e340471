"""One agent a node, and the coordinator's side of it: processes of several machines under one
supervisor.
"""
