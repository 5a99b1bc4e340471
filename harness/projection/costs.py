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
from trainchaos.harness.projection.durations import Duration, Lasting, Mixture
from trainchaos.harness.projection.result import Cost, t95

LEAST_INCIDENTS = 5
"""From fewer the spread of recoveries is not known; as for a median's interval of 94 %."""
REDO = "redo"


@dataclass(frozen=True, kw_only=True)
class RecoveryCost:
    """Of one strategy. ``stall``: from a failure until the job trains again, without the work that
    it does again; at ``nodes`` nodes, and ``per_doubling_s`` more for each doubling of them.
    ``incidents``: measured, 0 if given or published; ``source``: for people.

    ``rollback``: the work since the last checkpoint is done again; ``shrinks``: it goes on with the
    nodes that are left; ``kinds``: kind of fault -> what a recovery from it took, if measured.
    ``kind``: where the stall is from; of measured ones also their ``ranks`` (median), ``phases``
    (name -> median, seconds) and ``redone`` (median of the steps done again). ``plain``: without
    causes that have times of their own, where this has some; ``known``: the share of the mean
    recovery that is as in ``plain``.
    """

    strategy: str
    stall: Lasting
    nodes: float = 1.0
    per_doubling_s: float = 0.0
    rollback: bool = False
    shrinks: bool = False
    incidents: int = 0
    kinds: Mapping[str, Duration] = field(default_factory=dict)
    kind: Literal["measured", "given", "published"] = "published"
    ranks: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    redone: float | None = None
    plain: RecoveryCost | None = None
    known: float = 1.0
    source: str

    @property
    def unsure(self) -> float:
        """Half the 95 % interval of the mean recovery, as a share of it: of a lognormal by Cox's
        method (Zhou and Gao, "Confidence intervals for the log-normal mean", 1997) with Student's
        t. 0 where nothing was measured, or too little to know.
        """
        if self.plain is not None:
            return self.known * self.plain.unsure
        if self.incidents < LEAST_INCIDENTS or not isinstance(self.stall, Duration):
            return 0.0
        variance, known = self.stall.sigma**2, self.incidents - 1
        error = math.sqrt(variance / self.incidents + variance**2 / (2 * known))
        return math.expm1(t95(known) * error)

    @property
    def unsure_s(self) -> float:
        """The same in seconds: of what was measured, not of what a law or options add to it."""
        return self.unsure * self.stall.mean_s

    @property
    def said(self) -> Cost:
        """For results; what was measured, without what a mix of causes makes of it."""
        growth = (
            f"; {self.per_doubling_s:.4g} s more with each doubling from {self.nodes:g} nodes on"
        )
        found = Cost(
            kind=self.kind,
            source=f"{self.source}{growth if self.per_doubling_s else ''}",
            nodes=self.nodes,
            per_doubling_s=self.per_doubling_s,
        )
        if self.kind != "measured":
            return found
        plain = self.plain or self
        known = plain.incidents >= LEAST_INCIDENTS
        of = {
            "incidents": plain.incidents,
            "ranks": plain.ranks,
            "median_s": plain.stall.median_s,
            "low_s": plain.stall.mean_s / (1.0 + plain.unsure) if known else None,
            "high_s": plain.stall.mean_s * (1.0 + plain.unsure) if known else None,
            "sigma": plain.stall.sigma if known and isinstance(plain.stall, Duration) else None,
            "phases": dict(plain.phases),
            "redone": plain.redone,
        }
        return found.model_copy(update=of)

    def at(self, nodes: float) -> Lasting:
        """At a size: the law is a + b log2(nodes / measured nodes), never below what was measured.

        Forming a group of N ranks over a tree takes steps that grow with log N; the published
        requeue times (454 to 768 s at 256 to 2,048 nodes, ByteRobust) fit it with b = 105 s.
        """
        doublings = max(0.0, math.log2(nodes / self.nodes)) if self.nodes > 0 else 0.0
        return self.stall.grown(self.per_doubling_s * doublings)


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
    shrinks=True,
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

    Raises ScenarioError if a run was simulated, or if no run has an incident that was recovered
    from.
    """
    taken: dict[str, list[_Taken]] = defaultdict(list)
    for results in runs:
        if results.simulated:
            raise ScenarioError(
                f"{results.scenario}/{results.run_id} was simulated: its times are not measured",
                hint="give runs of real ranks",
            )
        strategies = {cell.id: cell.strategy for cell in results.cells if cell.exact_for is None}
        ranks = int(results.workload.get("ranks") or 1)
        for incident in alone(results.faults):
            strategy = strategies.get(incident.cell)
            stall_s = stall_of(incident)
            if strategy is not None and strategy in PUBLISHED and stall_s is not None:
                taken[strategy].append(_Taken(incident, stall_s, ranks))
    if not taken:
        raise ScenarioError(
            "no run has a failure that one of its strategies recovered from",
            hint="run a scenario that kills a rank, such as builtin:kill-one-rank",
        )
    return {name: _of(name, found) for name, found in taken.items()}


@dataclass(frozen=True)
class _Taken:
    """A recovery that counts, what it took without work done again, and the ranks of its job."""

    incident: Incident
    stall_s: float
    ranks: int


def _of(strategy: str, found: Sequence[_Taken]) -> RecoveryCost:
    kinds: dict[str, list[float]] = defaultdict(list)
    phases: dict[str, list[float]] = defaultdict(list)
    for one in found:
        kinds[one.incident.kind].append(one.stall_s)
        each: dict[str, float] = defaultdict(float)
        for span in one.incident.phases:
            each[span.name] += span.seconds
        for name, seconds in each.items():
            if name != REDO:
                phases[name].append(seconds)
    medians = {name: statistics.median(of) for name, of in phases.items()}
    ranks = statistics.median(one.ranks for one in found)
    redone = statistics.median(one.incident.steps_lost for one in found)
    source = f"measured at {ranks:g} ranks (n = {len(found)})"
    if len(kinds) > 1:
        said = (f"{k} {statistics.median(of):.3g} s (n = {len(of)})" for k, of in kinds.items())
        source = f"{source}: {', '.join(said)}"
    if medians:
        said = (f"{name} {seconds:.3g} s" for name, seconds in medians.items())
        source = f"{source}; medians: {', '.join(said)}, and {redone:g} steps done again"
    return replace(
        PUBLISHED[strategy],
        stall=lasting([one.stall_s for one in found]),
        nodes=1.0,
        per_doubling_s=0.0,
        incidents=len(found),
        kinds={kind: lasting(of) for kind, of in kinds.items()},
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


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of failures: its share of them, and what a recovery takes, seconds. ``share`` None:
    as a preset or a trace counts them. ``stall_s`` None: what was measured of the fault of that
    kind, else what the strategy takes anyway.
    """

    name: str
    share: float | None
    stall_s: float | None = None


def causes_of(given: Sequence[Cause], counts: Mapping[str, int]) -> list[Cause]:
    """All causes with their shares: those given, or those that were counted, with the times given.

    Raises ScenarioError where a name is given twice, some have a share and some have none, one
    without a share was not counted, or the shares do not sum to 1 within a millionth.
    """
    names = [one.name for one in given]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ScenarioError(f"cause {twice[0]} is given twice", hint="name each cause once")
    if all(one.share is None for one in given):
        if strange := [name for name in names if name not in counts]:
            raise ScenarioError(
                f"cause {strange[0]} has no share",
                hint=f"counted are {', '.join(counts)}"
                if counts
                else "write NAME=SHARE:DURATION, or give a --preset or a --trace with causes",
            )
        times = {one.name: one.stall_s for one in given}
        counted = sum(counts.values())
        return [
            Cause(name=name, share=count / counted, stall_s=times.get(name))
            for name, count in counts.items()
        ]
    shares = [one.share for one in given if one.share is not None]
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


def by_cause(cost: RecoveryCost, causes: Sequence[Cause], *, grow: bool = False) -> RecoveryCost:
    """With each failure of one of these causes (of ``causes_of``), which all strategies have alike.
    As it was where no cause has a time of its own. ``grow``: times that are given grow with the
    size as others do.
    """
    if all(one.stall_s is None and one.name not in cost.kinds for one in causes):
        return cost
    own = cost.stall if isinstance(cost.stall, Duration) else Duration(median_s=cost.stall.median_s)
    parts: list[tuple[float, Duration]] = []
    said = []
    for one in causes:
        share = one.share or 0.0
        takes, where = cost.kinds.get(one.name, own), "as all"
        if one.stall_s is not None:
            takes, where = Duration(median_s=one.stall_s, grows=grow), "as given"
        elif one.name in cost.kinds:
            where = "as measured"
        parts.append((share, takes))
        if where != "as all":
            said.append(f"{share:.1%} {one.name} {takes.median_s:.4g} s, {where}")
    rest = 1.0 - math.fsum(s for s, takes in parts if takes is not own)
    if rest > 0:
        said.append(f"{rest:.1%} all else {own.median_s:.4g} s")
    mixed = Mixture(parts)
    known_s = math.fsum(
        share * takes.mean_s
        for one, (share, takes) in zip(causes, parts, strict=True)
        if one.stall_s is None
    )
    return replace(
        cost,
        stall=mixed,
        plain=cost,
        known=known_s / mixed.mean_s if mixed.mean_s > 0 else 1.0,
        source=f"{cost.source}; {'; '.join(said)}",
    )


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
