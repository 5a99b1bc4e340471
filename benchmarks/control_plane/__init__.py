"""The control plane measured: its decisions alone (``controller``), and the real coordinator under
the load of simulated node agents (``load``).
"""
