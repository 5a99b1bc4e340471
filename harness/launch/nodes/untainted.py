"""What of the places of a cell is tainted, for launchers."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.launch import devices
from trainchaos.harness.launch.places.seats import Tainted, shortage, tainted_places
from trainchaos.harness.launch.rank_setup import strategy_for
from trainchaos.recovery.health.taints import names_of, taints_now


def tainted_here(places: Mapping[int, Sequence[str]]) -> Tainted:
    """What is tainted of nodes that are parts of this machine, by its host name and their numbers.
    Raises TaintError, NewerVersion.
    """
    return tainted_at(places, dict.fromkeys(places, socket.gethostname()), emulated=True)


def tainted_at(
    places: Mapping[int, Sequence[str]], hosts: Mapping[int, str], *, emulated: bool
) -> Tainted:
    """What is tainted of nodes with these hosts. ``places``: devices of each node. Raises
    TaintError, NewerVersion.
    """
    return tainted_places(taints_now(), names_of(hosts, emulated=emulated), places)


def lacks_untainted(cell: Cell) -> str | None:
    """Why a cell cannot be played on nodes that are parts of this machine: too much of it is
    tainted; None: it can. Raises TaintError, NewerVersion.
    """
    topology, workload = cell.scenario.topology, cell.scenario.workload
    spares = 0 if workload.command else strategy_for(cell).spares_wanted
    gpus = len(devices.cuda_devices()) if workload.device == "cuda" else 0
    here, _ = devices.placement(workload, gpus, spares)
    places = dict.fromkeys(range(topology.nodes), here)
    return shortage(cell, tainted_here(places), places, spares=spares)
