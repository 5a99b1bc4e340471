"""What a supervisor does about places that are suspect or about to fail, where it was asked to: it
has them checked before a process rejoins, and taints them for later jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.health.care.alarm_taints import AlarmTaints
from trainchaos.recovery.health.care.place_check import Answer, Checker, Spot
from trainchaos.recovery.health.care.suspect_places import SuspectPlaces
from trainchaos.recovery.health.readings.signs import Sign
from trainchaos.recovery.health.taints import TaintList
from trainchaos.recovery.policy.strategy import ANNOUNCED, Cause
from trainchaos.recovery.process.output import say

NOT_OF_A_PLACE = frozenset({*ANNOUNCED, Cause.NONFINITE})
"""Causes of failures that say nothing of the place where the process was."""


@dataclass(frozen=True, kw_only=True)
class Care:
    """What a user asks for. ``checker``: of suspect places, None: they are not checked; ``taints``:
    the list to add to, None: nothing is tainted.
    """

    checker: Checker | None = None
    taints: TaintList | None = None


NO_CARE = Care()


class Spots(Protocol):
    """Where the processes of a job are."""

    def spot_of(self, name: str) -> Spot | None:
        """Node and device of a process whose exit is not answered yet."""

    def spots_in_use(self) -> Collection[Spot]:
        """Those of all such processes."""

    def doubt(self, doubted: Callable[[Spot], bool]) -> None:
        """Start processes at spots that are ``doubted`` only where there is no other place."""


class PlaceCare:
    """``record``: writes an event; ``name_of``: by which name a taint means a node. Always
    ``close``.
    """

    def __init__(
        self,
        care: Care,
        spots: Spots,
        record: Callable[..., Any],
        now_s: Callable[[], float],
        name_of: Callable[[int], str],
    ) -> None:
        self._where, self._record, self._name_of = spots, record, name_of
        self._fit: Callable[[int, str], None] = lambda node, device: None
        checker, taints = care.checker, care.taints
        self._taints = None if taints is None else AlarmTaints(taints)
        self._suspects = (
            None
            if checker is None
            else SuspectPlaces(checker, record=record, found=self._found, now_s=now_s)
        )
        if self._suspects is not None:
            spots.doubt(self._suspects.avoids)

    def when_fit(self, fit: Callable[[int, str], None]) -> None:
        """``fit`` is called with the node and device of each place that is found fit."""
        self._fit = fit

    def failed(self, process: str, cause: str, detail: str) -> None:
        """A process failed; ``cause`` and ``detail`` as in ``failure_detected``."""
        if self._suspects is not None:
            self._suspects.failed(self._where.spot_of(process), cause, detail)

    def heard(self, sign: Sign, holder: str | None) -> None:
        """Something was found. ``holder``: the process that holds the rank that the sign names."""
        spots = self._spots(sign, holder)
        if self._suspects is not None:
            self._suspects.heard(sign, spots)
        if self._taints is None:
            return
        if sign.device is None and sign.rank is None:
            if sign.node is not None:
                self._taints.heard(sign, self._name_of(sign.node), None)
            return
        for node, device in spots:
            self._taints.heard(sign, self._name_of(node), _named(device))

    def recall(self, events: Iterable[Event]) -> None:
        """What a lost supervisor had found of places."""
        if self._suspects is not None:
            self._suspects.recall(events)

    def look(self) -> None:
        """Go on with checks, and record what was tainted. Never waits."""
        if self._suspects is not None:
            self._suspects.look()
        for place, by, failed in self._taints.take() if self._taints is not None else ():
            if failed:
                say(f"{place} could not be tainted: {failed}")
            else:
                self._record(Kind.PLACE_TAINTED, place=place, by=by)

    def close(self) -> None:
        """End checks, and write the last taints. Safe to repeat."""
        if self._suspects is not None:
            self._suspects.close()
        if self._taints is not None:
            self._taints.close()
            self.look()

    def _spots(self, sign: Sign, holder: str | None) -> list[Spot]:
        """The places that a sign means: of the smallest that it names."""
        if sign.rank is not None:
            spot = None if holder is None else self._where.spot_of(holder)
            return [] if spot is None else [spot]
        node = sign.node or 0
        if sign.device is not None:
            return [(node, sign.device)]
        return [spot for spot in self._where.spots_in_use() if spot[0] == node]

    def _found(self, answer: Answer) -> None:
        node, device = answer.spot
        if answer.fit:
            self._fit(node, device)
        elif self._taints is not None and not answer.emulated:
            said = answer.said or "unfit"
            evidence = {"check": "before a rejoin", "said": said[:200]}
            self._taints.taint(
                self._name_of(node), _named(device), f"preflight: {said}", evidence, by="preflight"
            )


def _named(device: str) -> str | None:
    """A device as a taint names it, without the node of ``cuda:3@n1``; None: a host's processors
    are all one place.
    """
    name = device.partition("@")[0]
    return None if name == "cpu" else name
