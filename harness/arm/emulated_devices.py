"""Devices whose monitors read what a fault says: for the detectors of devices, on any machine.

The devices of an arm are all well until ``health-event`` changes what one of them reads; then it
reads so for the rest of the arm. Nothing on the machine changes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from trainchaos.chaos.scenario.fault import FaultSpec
from trainchaos.recovery.health.readings import Place, Problem, Reading

PAST_S = 4400.0
"""Read before the arm began, as a machine's monitor has: ``ecc-acceleration`` wants an hour before
its window of ten minutes.
"""
PAST_EVERY_S = 2.0
"""Between two of those reads: ``slow-link`` wants three in ten seconds."""
LIMIT_DEGC = 90.0
"""At which the emulated device would slow itself down."""
USUAL: Mapping[str, float] = MappingProxyType(
    {"temperature": 62.0, "corrected-ecc": 0.2, "link-bandwidth": 100.0, "utilisation": 92.0}
)
"""What a device reads: degC; corrected errors an hour (``code`` of a fault: a minute); % of
``LINK_BYTES_PER_S``; %. Orders of magnitude of a data-centre GPU under load; the detectors compare
with a device's own past and its peers, so that no figure of a real one is needed.
"""
NOISE: Mapping[str, float] = MappingProxyType(
    {"temperature": 0.008, "link-bandwidth": 0.02, "utilisation": 0.03}
)
"""Standard deviation, in parts of the value."""
LINK_BYTES_PER_S = 2e11
METRICS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "temperature": ("temperature", "degC"),
        "corrected-ecc": ("ecc_corrected_volatile", "errors"),
        "link-bandwidth": ("nvlink_bandwidth_out", "bytes/s"),
        "utilisation": ("utilisation", "%"),
    }
)
"""What a fault changes -> the metric of ``recovery.health.nvml`` and its unit."""


class Changed(NamedTuple):
    """A value that a fault changed, as the monitor has read it for the first time."""

    what: str
    code: int
    rank: int | None
    node: int | None
    device: str | None


def emulated(faults: Iterable[FaultSpec]) -> list[str]:
    """Keys of ``METRICS`` that the faults of a scenario change, which its arms therefore read."""
    found = {fault.params.get("what") for fault in faults if fault.kind == "health-event"}
    return [what for what in METRICS if what in found]


class EmulatedDevices:
    """A health source: the devices of an arm's ranks. ``reads``: the keys of ``METRICS`` that it
    reads; ``device_of``: a rank's device; ``node_of``: its node; ``seed``: of the noise.
    """

    name = "emulated"

    def __init__(
        self,
        reads: Sequence[str],
        ranks: int,
        *,
        device_of: Callable[[int], str | None],
        node_of: Callable[[int], int | None],
        seed: str,
    ) -> None:
        self.reads, self._ranks, self._seed = reads, ranks, seed
        self._device_of, self._node_of = device_of, node_of
        self._changes: list[Changed] = []
        self._unsaid: list[Changed] = []
        self._said: list[Changed] = []
        self._noise = {rank: random.Random(f"{seed}/{rank}") for rank in range(ranks)}
        self._errors = dict.fromkeys(range(ranks), 0.0)
        self._places: dict[int, Place] = {}
        self._last_s: float | None = None
        self._spoilt: set[tuple[int | None, str | None]] = set()

    def change(self, changed: Changed) -> None:
        """From now on the devices of a rank or node read another value."""
        self._changes.append(changed)
        self._unsaid.append(changed)

    def spoil(self, node: int | None, device: str | None) -> None:
        """From now on a preflight of that device, or of all devices of a node, finds it unfit."""
        self._spoilt.add((None, device) if device is not None else (node, None))

    def unfit(self, node: int, device: str) -> bool:
        """Whether a preflight of a device of a node finds it unfit by a fault."""
        return not self._spoilt.isdisjoint({(None, device), (node, None)})

    def read(self, now_s: float) -> Sequence[Reading]:
        """One read of all devices, once every rank has had one; the first also tells the reads of
        ``PAST_S`` before. A rank without a process keeps the device that it had.
        """
        for rank in range(self._ranks):
            device = self._device_of(rank)
            if device is not None:
                self._places[rank] = Place(rank=rank, device=device)
        if len(self._places) < self._ranks:
            return ()
        past: list[float] = []
        if self._last_s is None:
            self._last_s = now_s - PAST_S
            times = int(PAST_S / PAST_EVERY_S)
            past = [now_s - PAST_S + PAST_EVERY_S * i for i in range(1, times)]
        found = [reading for at_s in (*past, now_s) for reading in self._once(at_s)]
        self._said += self._unsaid
        self._unsaid = []
        return found

    def problems(self) -> Sequence[Problem]:
        return ()

    def said(self) -> list[Changed]:
        """Changes that were read since the last call."""
        said, self._said = self._said, []
        return said

    def _once(self, at_s: float) -> Iterator[Reading]:
        took_s = at_s - (self._last_s if self._last_s is not None else at_s)
        self._last_s = at_s
        for rank, where in sorted(self._places.items()):
            for what in self.reads:
                metric, unit = METRICS[what]
                yield Reading(where, metric, self._value(rank, what, took_s), unit, at_s)
                if what == "temperature":
                    yield Reading(where, "temperature_slowdown", LIMIT_DEGC, unit, at_s)

    def _value(self, rank: int, what: str, took_s: float) -> float:
        noise, changed = self._noise[rank], self._changed(rank, what)
        if what == "corrected-ecc":
            per_s = USUAL[what] / 3600.0 if changed is None else changed / 60.0
            if noise.random() < -math.expm1(-per_s * took_s):
                self._errors[rank] += 1.0
            return self._errors[rank]
        level = USUAL[what] if changed is None else changed
        value = noise.gauss(level, NOISE[what] * level)
        if what == "temperature":
            return float(round(value))  # sensors read whole degrees
        value = min(100.0, max(0.0, value))
        return value if what == "utilisation" else value / 100.0 * LINK_BYTES_PER_S

    def _changed(self, rank: int, what: str) -> float | None:
        """What a fault made of a value, the last one that did."""
        for one in reversed(self._changes):
            hit = one.rank == rank or (one.rank is None and one.node == self._node_of(rank))
            if one.what == what and hit:
                return float(one.code)
        return None
