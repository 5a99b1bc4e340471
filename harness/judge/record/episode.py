"""One occurrence of a fault in the log: when it acted, on which target, and what it explains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.events.log import Event
from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.plugins import FAULTS, load

KEPT = ("parameter", "optimizer_state")
"""Surfaces of a rank that are its state."""
_NEVER_REPLACED = (Where.LINK, Where.STORAGE, Where.STORE)


def processes_hit(injected: Event) -> tuple[str, ...]:
    """The processes that an injection names as its targets: all of a node, if it hit one."""
    target = injected.data["target"] or {}
    several = target.get("processes")
    if isinstance(several, list):
        return tuple(several)
    return (target["process"],) if target.get("process") is not None else ()


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One occurrence of one fault, or a planned fault that never fired (``injected`` is None).

    ``process`` and ``rank``: the true target at injection time, if it is a process; ``processes``:
    all targets, if there are several; ``replica``: the processes that held the same copy of the
    model as the target, if it was sharded; ``over_ns``: when a fault that holds its target for a
    given time had released it; ``failure``: the first failure that it explains; ``others``: later
    ones.
    """

    fault: str
    kind: str
    occurrence: int
    target: dict[str, Any]
    process: str | None = None
    rank: int | None = None
    planned: Event | None
    injected: Event | None = None
    landed: Event | None = None
    failed: Event | None = None
    healed: Event | None = None
    failure: Event | None = None
    processes: tuple[str, ...] = ()
    others: tuple[Event, ...] = ()
    replica: tuple[str, ...] = ()
    over_ns: float = float("inf")

    def may_be_blamed(self, failure: Event) -> bool:
        """Whether a failure blames what was hit. Non-finite values in a shard spoil what the whole
        replica computes.
        """
        spoilt = failure.data["cause"] == "nonfinite"
        hit = self.processes or (None,)
        return failure.data["process"] in (*hit, *(self.replica if spoilt else ()))

    @property
    def failures(self) -> tuple[Event, ...]:
        """All that it explains."""
        return (self.failure, *self.others) if self.failure is not None else ()

    @property
    def evidence(self) -> Mapping[str, Any]:
        """What its witness saw of it."""
        seen = self.landed.data.get("evidence") if self.landed else None
        return seen if isinstance(seen, dict) else {}

    @property
    def planted(self) -> list[float]:
        """Values that it wrote into a tensor, as reported by the rank that it hit."""
        return [float(value) for value in self.evidence.get("new") or ()]

    @property
    def changed(self) -> bool:
        """Whether it left a rank with a different, but finite, state."""
        seen = self.evidence
        return self._is("changes_state") and seen.get("before") != seen.get("after")

    @property
    def changed_state(self) -> bool:
        """Whether the change outlasts the step: a gradient does not, as all ranks apply one sum."""
        return self.changed and self.evidence.get("surface", KEPT[0]) in KEPT

    @property
    def corrupts(self) -> bool:
        """Whether it corrupts values that training goes on with."""
        return self._is("corrupts")

    @property
    def beside_steps(self) -> bool:
        """Whether it cannot keep ranks from finishing a step."""
        return self._is("beside_steps")

    @property
    def seems_still(self) -> bool:
        """Whether the target works on but appears stalled."""
        return self._is("seems_still")

    @property
    def harmless(self) -> bool:
        """Whether it leaves nothing to recover from."""
        return self._is("harmless")

    def _is(self, what: str) -> bool:
        return bool(getattr(load(FAULTS, Fault).get(self.kind), what, False))

    @property
    def missed(self) -> bool:
        """Whether the target did not exist: the occurrence explains nothing and ended nothing."""
        absent = self.target.get("rank") is not None and self.target.get("process") is None
        return self.failed is not None and (absent or self.target.get("processes") == [])

    def lasts_over(self, start_ns: int, end_ns: int) -> bool:
        """Whether it acted, undetected, at some time in the interval (a straggler, a slow link).

        One that failed for want of evidence acted until it was healed. One that acts on something
        that is not replaced when a process fails, a link, a disk, a machine, outlives that failure.
        """
        if self.injected is None or (self.failed is not None and self.healed is None):
            return False
        if self.failure is not None and not self._outlives_its_victims:
            return False
        if self.target.get("everywhere"):
            return False  # it makes steps fail, not slow
        if self.planned is None or not self.planned.data.get("lasts", True):
            return False  # over once done, whenever its heal is logged
        until = self.healed.time_ns if self.healed else end_ns
        return self.injected.time_ns < end_ns and until > start_ns

    @property
    def _outlives_its_victims(self) -> bool:
        kind = load(FAULTS, Fault).get(self.kind)
        return kind is not None and (
            kind.where in _NEVER_REPLACED or (kind.where is Where.NODE and kind.harmless)
        )
