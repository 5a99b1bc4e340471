"""The coordinator's side of all nodes: connections, what is known of each node, and when one is
lost.
"""
