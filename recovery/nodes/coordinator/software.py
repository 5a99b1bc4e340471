"""Checks that all nodes have the same versions of the software that a job depends on."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.nodes.coordinator.node_state import NodeInfo


@cache
def versions() -> Mapping[str, str]:
    """The versions on this machine, read once: it takes milliseconds, and each node is compared."""
    return MappingProxyType({"python": sys.version.split()[0], "torch": metadata.version("torch")})


def refuse_other(info: NodeInfo) -> None:
    """Raise InfrastructureError when a node has other versions."""
    theirs, ours = info.versions, versions()
    other = {name: theirs.get(name, "none") for name in ours if theirs.get(name) != ours[name]}
    if other:
        said = ", ".join(
            f"{name} {version} and not {ours[name]}" for name, version in other.items()
        )
        raise InfrastructureError(
            f"node {info.node} has {said}", hint="install the same versions on all nodes and here"
        )
