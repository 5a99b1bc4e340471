"""What a recovery costs, per strategy: measured by stored runs, given, or published."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import Results
from trainchaos.harness.projection.laws import Duration, Lasting, Mixture
from trainchaos.harness.projection.result import Cost, t95

LEAST_INCIDENTS = 5
"""From fewer the spread of recoveries is not known; as for a median's interval of 94 %."""
REDO = "redo"


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of failures: its share of them, and what a recovery takes, seconds. ``share`` None:
    as a preset or a trace counts them. ``stall_s`` None: what was measured of the fault of that
    kind, else what the strategy takes anyway. ``grows``: a time that is given grows with the size
    as others do.
    """

    name: str
    share: float | None
    stall_s: float | None = None
    grows: bool = False


@dataclass(frozen=True, kw_only=True)
class RecoveryCost:
    """Of one strategy. ``stall``: from a failure until the job trains again, without the work that
    it does again; at ``nodes`` nodes, and ``per_doubling_s`` more for each doubling of them.
    ``incidents``: measured, 0 if given or published; ``source``: for people.

    ``rollback``: the work since the last checkpoint is done again, else it goes on with the nodes
    that are left; ``kinds``: kind of fault -> what a recovery from it took, if measured. ``kind``:
    where the stall is from; of measured ones also their ``ranks`` (median), ``phases`` (name ->
    median, seconds) and ``redone`` (median of the steps done again). ``causes``: of all failures,
    where some have times of their own.
    """

    strategy: str
    stall: Duration
    nodes: float = 1.0
    per_doubling_s: float = 0.0
    rollback: bool = False
    incidents: int = 0
    kinds: Mapping[str, Duration] = field(default_factory=dict)
    kind: Literal["measured", "given", "published"] = "published"
    ranks: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    redone: float | None = None
    causes: tuple[Cause, ...] = ()
    source: str

    @property
    def unsure(self) -> float:
        """Half the 95 % interval of the mean recovery, as a share of it: of a lognormal by Cox's
        method (Zhou and Gao, "Confidence intervals for the log-normal mean", 1997) with Student's
        t. 0 where nothing was measured, or too little to know.
        """
        if self.incidents < LEAST_INCIDENTS:
            return 0.0
        variance, degrees = self.stall.sigma**2, self.incidents - 1
        error = math.sqrt(variance / self.incidents + variance**2 / (2 * degrees))
        return math.expm1(t95(degrees) * error)

    @property
    def unsure_s(self) -> float:
        """The same in seconds: of what was measured, not of what a law or options add to it."""
        measured_s = self.stall.mean_s
        if self.causes:
            own = [cause for cause in self.causes if cause.stall_s is None]
            measured_s = math.fsum((o.share or 0.0) * self._takes(o).mean_s for o in own)
        return self.unsure * measured_s

    @property
    def said(self) -> Cost:
        """For results; what was measured, without what a mix of causes makes of it."""
        growth = f"{self.per_doubling_s:.4g} s more with each doubling from {self.nodes:g} nodes on"
        sure = self.incidents >= LEAST_INCIDENTS
        return Cost(
            kind=self.kind,
            source=f"{self.source}; {growth}" if self.per_doubling_s else self.source,
            nodes=self.nodes,
            per_doubling_s=self.per_doubling_s,
            incidents=self.incidents,
            ranks=self.ranks,
            median_s=self.stall.median_s if self.kind == "measured" else None,
            low_s=self.stall.mean_s / (1.0 + self.unsure) if sure else None,
            high_s=self.stall.mean_s * (1.0 + self.unsure) if sure else None,
            sigma=self.stall.sigma if sure else None,
            phases=dict(self.phases),
            redone=self.redone,
        )

    def at(self, nodes: float) -> Lasting:
        """At a size: the law is a + b log2(nodes / measured nodes), never below what was measured.

        Forming a group of N ranks over a tree takes steps that grow with log N; the published
        requeue times (454 to 768 s at 256 to 2,048 nodes, ByteRobust) fit it with b = 105 s.
        """
        longer_s = self.per_doubling_s * max(0.0, math.log2(nodes / self.nodes))
        if not self.causes:
            return self.stall.longer(longer_s)
        parts = []
        for cause in self.causes:
            grows = cause.stall_s is None or cause.grows
            parts.append((cause.share or 0.0, self._takes(cause).longer(grows * longer_s)))
        return Mixture(parts)

    def _takes(self, cause: Cause) -> Duration:
        if cause.stall_s is not None:
            return Duration(median_s=cause.stall_s)
        return self.kinds.get(cause.name, self.stall)

    def by_cause(self, causes: Sequence[Cause]) -> RecoveryCost:
        """With each failure of one of these causes (of ``causes_of``), which all strategies have
        alike. As it was where no cause has a time of its own.
        """
        own = [one for one in causes if one.stall_s is not None or one.name in self.kinds]
        if not own:
            return self
        words = [
            f"{one.share:.1%} {one.name} {self._takes(one).median_s:.4g} s,"
            f" {'as measured' if one.stall_s is None else 'as given'}"
            for one in own
        ]
        rest = 1.0 - math.fsum(one.share or 0.0 for one in own)
        if rest > 0:
            words.append(f"{rest:.1%} all else {self.stall.median_s:.4g} s")
        return replace(self, causes=tuple(causes), source="; ".join([self.source, *words]))


_REQUEUE = RecoveryCost(
    strategy="checkpoint-restart",
    stall=Duration(median_s=454.0),
    nodes=256,
    per_doubling_s=(768.0 - 454.0) / 3,
    rollback=True,
    source="ByteRobust, 2025: requeue at 2,048 GPUs",
)
_UPDATE = RecoveryCost(
    strategy="hot-spare",
    stall=Duration(median_s=46.0),
    nodes=256,
    per_doubling_s=(65.0 - 46.0) / 3,
    source="ByteRobust, 2025: in-place update at 2,048 GPUs",
)
_DROP = replace(
    _UPDATE,
    strategy="drop-replica",
    source=f"{_UPDATE.source}; as for a spare, without a published figure of its own",
)
PUBLISHED: Mapping[str, RecoveryCost] = {one.strategy: one for one in (_REQUEUE, _UPDATE, _DROP)}
"""Where nothing is measured or given."""


def measured(runs: Iterable[Results]) -> dict[str, RecoveryCost]:
    """The stalls of all runs, by strategy: from LEAST_INCIDENTS on lognormal with the mean and the
    standard deviation of the logarithms of what was measured, of fewer their median. A stall is the
    recovery time without the time of steps done again; of failures that came alone, see ``alone``.

    Raises ScenarioError if no run has an incident that was recovered from.
    """
    taken: dict[str, list[tuple[Incident, float, int]]] = defaultdict(list)
    for results in runs:
        strategies = {cell.id: cell.strategy for cell in results.cells if cell.exact_for is None}
        ranks = int(results.workload.get("ranks") or 1)
        for incident in alone(results.faults):
            strategy, stall_s = strategies.get(incident.cell), stall_of(incident)
            if strategy is not None and strategy in PUBLISHED and stall_s is not None:
                taken[strategy].append((incident, stall_s, ranks))
    if not taken:
        raise ScenarioError(
            "no run has a failure that one of its strategies recovered from",
            hint="run a scenario that kills a rank, such as builtin:kill-one-rank",
        )
    return {name: _measured(name, recoveries) for name, recoveries in taken.items()}


def _measured(strategy: str, recoveries: Sequence[tuple[Incident, float, int]]) -> RecoveryCost:
    """``recoveries``: each incident, its stall and the ranks of its job."""
    kinds: dict[str, list[float]] = defaultdict(list)
    phases: dict[str, list[float]] = defaultdict(list)
    for incident, stall_s, _ in recoveries:
        kinds[incident.kind].append(stall_s)
        for name in dict.fromkeys(span.name for span in incident.phases if span.name != REDO):
            phases[name].append(sum(s.seconds for s in incident.phases if s.name == name))
    medians = {name: statistics.median(seconds) for name, seconds in phases.items()}
    ranks = statistics.median(ranks for *_, ranks in recoveries)
    redone = statistics.median(incident.steps_lost for incident, *_ in recoveries)
    source = f"measured at {ranks:g} ranks (n = {len(recoveries)})"
    if len(kinds) > 1:
        of = (f"{k} {statistics.median(s):.3g} s (n = {len(s)})" for k, s in kinds.items())
        source = f"{source}: {', '.join(of)}"
    if medians:
        of = (f"{name} {seconds:.3g} s" for name, seconds in medians.items())
        source = f"{source}; medians: {', '.join(of)}, and {redone:g} steps done again"
    return replace(
        PUBLISHED[strategy],
        stall=lasting([stall_s for _, stall_s, _ in recoveries]),
        nodes=1.0,
        per_doubling_s=0.0,
        incidents=len(recoveries),
        kinds={kind: lasting(stalls) for kind, stalls in kinds.items()},
        kind="measured",
        ranks=ranks,
        phases=medians,
        redone=redone,
        source=source,
    )


def lasting(stalls: Sequence[float]) -> Duration:
    """Lognormal, as the logarithms are; of fewer than LEAST_INCIDENTS their median, which does not
    vary. ``stalls``: seconds, positive, at least one.
    """
    if len(stalls) < LEAST_INCIDENTS:
        return Duration(median_s=statistics.median(stalls))
    logs = [math.log(one) for one in stalls]
    return Duration(median_s=math.exp(statistics.fmean(logs)), sigma=statistics.stdev(logs))


def causes_of(given: Sequence[Cause], counts: Mapping[str, int]) -> list[Cause]:
    """All causes with their shares: those given, or those that were counted, with the times given.

    Raises ScenarioError where a name is given twice, some have a share and some have none, one
    without a share was not counted, or the shares do not sum to 1 within a millionth.
    """
    named = {cause.name: cause for cause in given}
    if len(named) < len(given):
        names = [cause.name for cause in given]
        twice = max(names, key=names.count)
        raise ScenarioError(f"cause {twice} is given twice", hint="name each cause once")
    shares = [cause.share for cause in given if cause.share is not None]
    if not shares:
        if strange := [name for name in named if name not in counts]:
            raise ScenarioError(
                f"cause {strange[0]} has no share",
                hint=f"counted are {', '.join(counts)}"
                if counts
                else "write NAME=SHARE:DURATION, or give a --preset or a --trace with causes",
            )
        counted = sum(counts.values())
        plain = {name: Cause(name=name, share=None) for name in counts} | named
        return [replace(plain[name], share=count / counted) for name, count in counts.items()]
    if len(shares) < len(given):
        raise ScenarioError(
            "some causes have a share and some have none",
            hint="shares for all, or times alone for those of a preset",
        )
    total = math.fsum(shares)
    if abs(total - 1.0) > 1e-6:
        raise ScenarioError(
            f"the shares of causes sum to {total:g}, not to 1",
            hint="such as --cause hardware=0.6:6m --cause software=0.4",
        )
    return [replace(one, share=share / total) for one, share in zip(given, shares, strict=True)]


def alone(incidents: Sequence[Incident]) -> list[Incident]:
    """Those that no other failure of their arm overlaps. Two failures at once are recovered from
    together, so that the time of each has the other's in it.
    """
    arms: dict[tuple[str, int], list[Incident]] = defaultdict(list)
    for one in incidents:
        arms[one.cell, one.repeat].append(one)
    return [
        one
        for one in incidents
        if one.answered_with is None
        and not any(
            _begins_in(other, one) or _begins_in(one, other)
            for other in arms[one.cell, one.repeat]
            if other is not one and other.fired
        )
    ]


def _begins_in(late: Incident, early: Incident) -> bool:
    took_s = early.recovery_time or 0.0
    return early.injected_s <= late.injected_s < early.injected_s + took_s


def stall_of(incident: Incident) -> float | None:
    """Its recovery time without work done again, seconds. None: nothing was interrupted, or it was
    never recovered from.
    """
    took_s = incident.recovery_time
    if incident.outcome != "recovered" or took_s is None or not math.isfinite(took_s):
        return None
    again_s = sum(span.seconds for span in incident.phases if span.name == REDO)
    stall_s = took_s - again_s
    return stall_s if stall_s > 0 else None
