"""The agent of one node: its processes, and its way to the coordinator."""
