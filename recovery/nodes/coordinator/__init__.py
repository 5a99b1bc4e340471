"""The coordinator's side of all nodes: connections, what is known of each, and when one is lost."""
