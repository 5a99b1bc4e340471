"""Checkpoints in memory: a keeper, one small process per node, holds what the node's ranks save and
a copy of a peer node's.

It outlives the ranks, so that a restart reads memory instead of a disk; whatever a lost node held,
another one holds too. No torch here, and nothing is unpickled. ``header``: describes a part, and
the file that it lies in; ``protocol``: messages; ``keeper_store``: the parts that a keeper holds;
``keeper``: the process; ``peers``: keepers among themselves; ``client``: a rank's side;
``keepers``: the supervisor's side.
"""

ROLE = "keeper"
"""Role of a keeper in ``process_spawned``: it never trains, and a supervisor does not ask for its
status.
"""

KEPT = 2
"""Complete checkpoints that keepers hold; older ones go as the next is complete."""
