"""Where the processes of an arm start: seats on nodes, and places that are tainted."""
