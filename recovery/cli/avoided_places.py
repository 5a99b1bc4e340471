"""The tainted places of a supervised job, and the places that are left."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from trainchaos.recovery.health.checks import Spot
from trainchaos.recovery.health.taints import (
    WHAT_TO_DO,
    Taint,
    TooFewPlaces,
    about,
    listed,
    names_of,
)


class AvoidedPlaces:
    """``taints``: those that hold, read once, when the job starts."""

    def __init__(self, taints: Sequence[Taint]) -> None:
        self._taints = taints
        self._names: dict[int, tuple[str, ...]] = {}
        self._met: list[Taint] = []
        self._nodes: set[int] = set()
        self._devices: set[str] = set()

    def hosts_are(self, hosts: Mapping[int, str]) -> None:
        """The host of each node of the job."""
        self._names = names_of(hosts)
        self._nodes = {node for node, names in self._names.items() if self._note(names)}

    def name_of(self, node: int) -> str:
        """By which name a taint means a node of the job, and no other."""
        names = self._names.get(node)
        return names[-1] if names else socket.gethostname()

    def left_here(self, devices: Sequence[str], wanted: int) -> tuple[str, ...]:
        """The devices of this machine that ``wanted`` processes may use. Raises TooFewPlaces if
        there is none, or if processes would share a GPU because of taints.
        """
        names = (socket.gethostname(),)
        self._nodes = {0} if self._note(names) else set()
        left = tuple(name for name in devices if not self._note(names, name))
        self._devices = set(devices) - set(left)
        self._refuse(len(devices), len(left), wanted, cuda=devices[0].startswith("cuda"))
        return left

    def refuse_shortage(self, spots: Sequence[Spot], wanted: int) -> None:
        """Raises TooFewPlaces if ``wanted`` processes do not find places among ``spots`` for one
        process each, though they would without taints.
        """
        left = [spot for spot in spots if not self._avoids(spot)]
        self._devices = {
            f"{spot[1]}@n{spot[0]}"
            for spot in spots
            if self._avoids(spot) and spot[0] not in self._nodes
        }
        self._refuse(len(spots), len(left), wanted, cuda=True)

    def left(self, spots: Sequence[Spot]) -> Sequence[Spot]:
        """Spots that are not tainted, or all if there is no such."""
        return [spot for spot in spots if not self._avoids(spot)] or spots

    def as_event(self) -> dict[str, Any]:
        """What is tainted of the job's places, as an event's data; empty: nothing."""
        if not self._met:
            return {}
        devices = sorted(self._devices)
        return {"taints": about(self._met), "nodes": sorted(self._nodes), "devices": devices}

    def _avoids(self, spot: Spot) -> bool:
        return bool(self._note(self._names.get(spot[0], ()), spot[1]))

    def _note(self, names: Sequence[str], device: str | None = None) -> tuple[Taint, ...]:
        found = tuple(taint for taint in self._taints if taint.means(names, device))
        self._met += [taint for taint in found if taint not in self._met]
        return found

    def _refuse(self, every: int, left: int, wanted: int, *, cuda: bool) -> None:
        """``cuda``: places are not shared, unless there are too few of them in any case."""
        if not self._met or (left and not (cuda and every >= wanted > left)):
            return
        lacks = f"{wanted} processes are to start, and {left} of {every} places are not tainted"
        raise TooFewPlaces(f"{lacks}: {listed(self._met)}", hint=WHAT_TO_DO)
