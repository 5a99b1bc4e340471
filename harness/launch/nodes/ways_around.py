"""Whether ranks of nodes would connect to each other past a link proxy."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.nodes.coordinator.node_state import NodeInfo


def refuse_ways_around(host: str, known: Mapping[int, NodeInfo]) -> None:
    """Raise InfrastructureError if ranks of a node would bypass a link proxy at ``host``."""
    for node, info in known.items():
        if not _below(host, info.address):
            raise InfrastructureError(
                f"the link proxy is at {host}, and node {node} at {info.address}: gloo connects"
                " only to lower addresses",
                hint=(
                    "give the coordinator an address below those of all nodes, or leave out"
                    " faults on links"
                ),
            )


def _below(one: str, other: str) -> bool:
    try:
        return socket.inet_aton(one) < socket.inet_aton(other)
    except OSError:
        return False  # not IPv4: gloo's order of these addresses is not known
