"""The control plane measured: its decisions alone (``__main__``), its messages (``messages``), and
the real coordinator under the load of simulated node agents (``load``).
"""
