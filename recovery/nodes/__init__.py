"""One agent per node, and the coordinator's side of it: processes of several machines under one
supervisor.
"""
