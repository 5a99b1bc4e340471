"""Checks what a scenario ``requires`` of the machine beyond devices, cores and memory, by trying it
or reading it from the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from trainchaos.chaos.scenario.model import Cell, Requires
from trainchaos.harness.host.container_engine import lacks_engine
from trainchaos.harness.launch.cgroups import lacks_cgroup
from trainchaos.harness.launch.storage import lacks_mount

_CAP_NET_ADMIN = 12
_STATUS = Path("/proc/self/status")


def too_small(cell: Cell) -> str | None:
    """Why a cell has fewer ranks than its scenario requires; None when it has enough."""
    wanted, ranks = cell.scenario.requires.world_size, cell.scenario.workload.ranks
    return f"requires world_size {wanted}, this cell has {ranks} ranks" if ranks < wanted else None


def unmet(
    requires: Requires, probes: Mapping[str, Callable[[], str | None]] | None = None
) -> str | None:
    """Everything required that this machine lacks, in one line; None if nothing is missing.

    ``probes``: capability -> why it is missing, or None; by default the probes of this machine.
    """
    wanted = (
        (name, probe) for name, probe in (probes or PROBES).items() if getattr(requires, name)
    )
    return (
        "; ".join(f"requires {name}: {why}" for name, probe in wanted if (why := probe())) or None
    )


def _root() -> str | None:
    return None if os.geteuid() == 0 else "this user is not root"


def _net_admin() -> str | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError as error:
        return f"{_STATUS} cannot be read: {error.strerror}"
    held = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return (
        None
        if held >> _CAP_NET_ADMIN & 1
        else "this process may not change network devices (CAP_NET_ADMIN)"
    )


PROBES: Mapping[str, Callable[[], str | None]] = MappingProxyType(
    {
        "root": _root,
        "net_admin": _net_admin,
        "mount": lacks_mount,
        "cgroup": lacks_cgroup,
        "docker": lacks_engine,
    }
)
