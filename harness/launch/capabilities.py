"""Checks what a scenario ``requires`` of the machine beyond devices, cores and memory, by trying it
or reading it from the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from trainchaos.chaos.scenario.model import Cell, Requires

_CAP_NET_ADMIN = 12
_STATUS = Path("/proc/self/status")
_CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))


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
    return "; ".join(_unmet(requires, probes or PROBES)) or None


def _unmet(requires: Requires, probes: Mapping[str, Callable[[], str | None]]) -> Iterator[str]:
    for name, probe in probes.items():
        if getattr(requires, name):
            why = probe()
            if why:
                yield f"requires {name}: {why}"


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


def _mount() -> str | None:
    from trainchaos.harness.launch.storage import lacks_mount

    return lacks_mount()


def _cgroup() -> str | None:
    if any(
        root.is_dir() and os.access(root, os.W_OK) and (root / "cgroup.procs").exists()
        for root in _CGROUPS
    ):
        return None
    return "no control group of this machine can be written to"


def _docker() -> str | None:
    from trainchaos.harness.host.container_engine import lacks_engine

    return lacks_engine()


PROBES: Mapping[str, Callable[[], str | None]] = MappingProxyType(
    {"root": _root, "net_admin": _net_admin, "mount": _mount, "cgroup": _cgroup, "docker": _docker}
)
