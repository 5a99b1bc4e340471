"""Tells a supervisor of the processes whose place is about to fail, by what was found there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol

from trainchaos.recovery.health.credible import announced
from trainchaos.recovery.health.readings.signs import Sign


class Places(Protocol):
    """Where the processes of a job are. A device's name is the same as in the signs."""

    def living(self) -> Iterable[str]:
        """Processes that are neither gone nor asked to end."""

    def gone(self, process: str) -> bool:
        """Whether its exit is known."""

    def node_of(self, process: str) -> int | None:
        """Its node."""

    def device_of(self, process: str) -> str | None:
        """Its device."""

    def avoid(self, *, nodes: Collection[int], devices: Collection[str]) -> None:
        """Start processes there, from now on, only where there is no other place."""


class Warned(Protocol):
    """The supervisor; ``recovery.supervise.controller.Controller`` says what each call means."""

    def on_warnings(self, warnings: Mapping[str, str]) -> None:
        """Process -> why its place is about to fail."""

    def no_better_place(self, processes: Iterable[str]) -> None:
        """These were started at a place that is about to fail."""


Supervise = Callable[[Callable[[Warned], None]], object]
"""Calls its argument with the supervisor, if there is one now."""


class PlaceWarnings:
    """The warnings of one job. Each is repeated until its process is gone: a supervisor may be lost
    before it acts on one, and a second time means nothing to it.
    """

    def __init__(self, places: Places, process_of: Callable[[int], str | None]) -> None:
        """``process_of``: the living process that holds a rank."""
        self._places, self._process_of = places, process_of
        self._open: dict[str, str] = {}
        self._nodes: set[int] = set()  # that are about to fail
        self._devices: set[str] = set()

    def heard(self, sign: Sign) -> str:
        """Something was found; most of it is no warning. Returns why it is one, or ""."""
        why = announced(sign)
        if not why:
            return ""
        names = list(self._on(sign))
        if sign.device is not None:
            self._devices.add(sign.device)
        elif sign.rank is None and sign.node is not None:
            self._nodes.add(sign.node)
        self._places.avoid(nodes=self._nodes, devices=self._devices)
        place = sign.device or (f"node {sign.node}" if sign.rank is None else f"rank {sign.rank}")
        self._open |= {name: f"{why}, on {place}" for name in names if name not in self._open}
        return why

    def lift(self, device: str) -> None:
        """A device was found fit since: it is used again. Who was warned leaves it all the same."""
        self._devices.discard(device)
        self._places.avoid(nodes=self._nodes, devices=self._devices)

    def tell(self, supervise: Supervise) -> None:
        """Tell the supervisor."""
        if not self._nodes and not self._devices and not self._open:
            return
        places = self._places
        self._open = {name: why for name, why in self._open.items() if not places.gone(name)}
        late = [name for name in places.living() if name not in self._open and self._fails(name)]
        supervise(lambda controller: controller.on_warnings(self._open))
        supervise(lambda controller: controller.no_better_place(late))

    def _fails(self, process: str) -> bool:
        """Whether a process is at a place that is about to fail."""
        places = self._places
        return places.node_of(process) in self._nodes or places.device_of(process) in self._devices

    def _on(self, sign: Sign) -> Iterator[str]:
        """The processes at the place of a sign: of the smallest place that it names."""
        places = self._places
        if sign.rank is not None:
            holder = self._process_of(sign.rank)
            yield from (holder,) if holder else ()
            return
        for name in places.living():
            if sign.device is not None:
                if places.device_of(name) == sign.device:
                    yield name
            elif sign.node is not None and places.node_of(name) == sign.node:
                yield name
