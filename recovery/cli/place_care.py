"""What a supervisor does about places that are suspect or about to fail, where it was asked to: it
has them checked before a process rejoins, and taints them for later jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.cli.processes import JobProcesses
from trainchaos.recovery.cli.suspect_places import Spot, SuspectPlaces
from trainchaos.recovery.health.alarm_taints import AlarmTaints
from trainchaos.recovery.health.readings.signs import Sign
from trainchaos.recovery.health.taints import TaintList
from trainchaos.recovery.process.output import say


@dataclass(frozen=True, kw_only=True)
class Care:
    """What a user asks for. ``check``: the program of ``SuspectPlaces``, None: places are not
    checked; ``taints``: the list to add to, None: nothing is tainted.
    """

    check: Sequence[str] | None = None
    taints: TaintList | None = None


NO_CARE = Care()


class PlaceCare:
    """``record``: writes an event; ``name_of``: by which name a taint means a node. Always
    ``close``.
    """

    def __init__(
        self,
        care: Care,
        processes: JobProcesses,
        record: Callable[..., Any],
        now_s: Callable[[], float],
        name_of: Callable[[int], str],
    ) -> None:
        self._processes, self._record, self._name_of = processes, record, name_of
        check, taints = care.check, care.taints
        self._taints = None if taints is None else AlarmTaints(taints)
        self._suspects = (
            None
            if check is None
            else SuspectPlaces(check, record=record, unfit=self._unfit, now_s=now_s)
        )
        if self._suspects is not None:
            processes.doubt(self._suspects.avoids)

    def failed(self, process: str, cause: str, detail: str) -> None:
        """A process failed; ``cause`` and ``detail`` as in ``failure_detected``."""
        if self._suspects is not None:
            self._suspects.failed(self._processes.spot_of(process), cause, detail)

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
            spot = None if holder is None else self._processes.spot_of(holder)
            return [] if spot is None else [spot]
        node = sign.node or 0
        if sign.device is not None:
            return [(node, sign.device)]
        return [spot for spot in self._processes.spots_in_use() if spot[0] == node]

    def _unfit(self, node: int, device: str, said: str) -> None:
        if self._taints is not None:
            evidence = {"check": "before a rejoin", "said": said[:200]}
            self._taints.taint(
                self._name_of(node), _named(device), f"preflight: {said}", evidence, by="preflight"
            )


def _named(device: str) -> str | None:
    """A device as a taint names it; None: a host's processors are all one place."""
    return None if device == "cpu" else device
