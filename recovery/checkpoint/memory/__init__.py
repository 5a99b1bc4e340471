"""Checkpoints in memory: a keeper, one small process a node, holds what its ranks save and a copy
of a peer node's.

It outlives the ranks, so a restart reads memory instead of a disk; a lost node takes nothing with
it that another one does not hold. No torch here, and nothing is unpickled. ``header``: what
describes a piece of state; ``talk``: messages; ``holdings``: what a keeper keeps, and for how long;
``keeper``: the process; ``peers``: keepers among themselves; ``client``: a rank's side;
``keepers``: the supervisor's side.
"""

ROLE = "keeper"
"""Of a keeper in ``process_spawned``: it never trains, and no supervisor asks it where it is."""

KEPT = 2
"""Complete checkpoints that keepers hold; older ones go as the next is complete."""
