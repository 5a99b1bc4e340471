"""The agent of one node: its processes, and its connection to the coordinator."""
