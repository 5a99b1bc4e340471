"""What a recovery costs, per strategy: measured by stored runs, given, or published."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import Results
from trainchaos.harness.projection.durations import Duration, Lasting, Mixture, t95

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
    """

    strategy: str
    stall: Lasting
    nodes: float = 1.0
    per_doubling_s: float = 0.0
    rollback: bool = False
    shrinks: bool = False
    incidents: int = 0
    kinds: Mapping[str, Duration] = field(default_factory=dict)
    source: str

    @property
    def unsure(self) -> float:
        """Half the 95 % interval of the mean recovery, as a share of it: by Student's t over the
        logarithms of what was measured. 0 where nothing was measured, or too little to know.
        """
        if self.incidents < LEAST_INCIDENTS or not isinstance(self.stall, Duration):
            return 0.0
        return math.expm1(t95(self.incidents - 1) * self.stall.sigma / math.sqrt(self.incidents))

    def at(self, nodes: float) -> Lasting:
        """At a size: the law is a + b log2(nodes / measured nodes), never below what was measured.

        Forming a group of N ranks over a tree takes steps that grow with log N; the published
        requeue times (454 to 768 s at 256 to 2,048 nodes, ByteRobust) fit it with b = 105 s.
        """
        doublings = max(0.0, math.log2(nodes / self.nodes)) if self.nodes > 0 else 0.0
        return self.stall.longer(self.per_doubling_s * doublings)


_REQUEUE = RecoveryCost(
    strategy="checkpoint-restart",
    stall=Duration(median_s=454.0),
    nodes=256,
    per_doubling_s=(768.0 - 454.0) / 3,
    rollback=True,
    source="ByteRobust, 2025: requeue at 2,048 GPUs, and its growth to 16,384",
)
_UPDATE = RecoveryCost(
    strategy="hot-spare",
    stall=Duration(median_s=46.0),
    nodes=256,
    per_doubling_s=(65.0 - 46.0) / 3,
    shrinks=True,
    source="ByteRobust, 2025: in-place update at 2,048 GPUs, and its growth to 16,384",
)
_DROP = replace(
    _UPDATE,
    strategy="drop-replica",
    source=f"{_UPDATE.source}; as for a spare, without a published figure of its own",
)
PUBLISHED: Mapping[str, RecoveryCost] = {one.strategy: one for one in (_REQUEUE, _UPDATE, _DROP)}
"""Where nothing is measured or given."""


def measured(runs: Iterable[Results]) -> dict[str, RecoveryCost]:
    """The stalls of all runs, by strategy: lognormal with the median and, from LEAST_INCIDENTS on,
    the standard deviation of the logarithms of what was measured. A stall is the recovery time
    without the time of steps done again; of failures that came alone, see ``alone``.

    Raises ScenarioError if a run was simulated, or if no run has an incident that was recovered
    from.
    """
    stalls: dict[str, list[tuple[str, float]]] = defaultdict(list)
    ranks: dict[str, list[int]] = defaultdict(list)
    for results in runs:
        if results.simulated:
            raise ScenarioError(
                f"{results.scenario}/{results.run_id} was simulated: its times are not measured",
                hint="give runs of real ranks",
            )
        strategies = {cell.id: cell.strategy for cell in results.cells if cell.exact_for is None}
        for incident in alone(results.faults):
            strategy = strategies.get(incident.cell)
            stall_s = stall_of(incident)
            if strategy is not None and strategy in PUBLISHED and stall_s is not None:
                stalls[strategy].append((incident.kind, stall_s))
                ranks[strategy].append(int(results.workload.get("ranks") or 1))
    if not stalls:
        raise ScenarioError(
            "no run has a failure that one of its strategies recovered from",
            hint="run a scenario that kills a rank, such as builtin:kill-one-rank",
        )
    return {name: _of(name, found, ranks[name]) for name, found in stalls.items()}


def _of(strategy: str, found: Sequence[tuple[str, float]], ranks: Sequence[int]) -> RecoveryCost:
    kinds = {
        kind: [one for name, one in found if name == kind]
        for kind in dict.fromkeys(name for name, _ in found)
    }
    size = statistics.median(ranks)
    source = f"measured at {size:g} ranks (n = {len(found)})"
    if len(kinds) > 1:
        each = (f"{k} {statistics.median(of):.3g} s (n = {len(of)})" for k, of in kinds.items())
        source = f"{source}: {', '.join(each)}"
    return replace(
        PUBLISHED[strategy],
        stall=_lasting([one for _, one in found]),
        nodes=1.0,
        per_doubling_s=0.0,
        incidents=len(found),
        kinds={kind: _lasting(of) for kind, of in kinds.items()},
        source=source,
    )


def _lasting(stalls: Sequence[float]) -> Duration:
    logs = [math.log(one) for one in stalls]
    sigma = statistics.stdev(logs) if len(logs) >= LEAST_INCIDENTS else 0.0
    return Duration(median_s=statistics.median(stalls), sigma=sigma)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of failures: its share of them, and what a recovery takes, seconds. ``stall_s`` None:
    what was measured of the fault of that kind, else what the strategy takes anyway.
    """

    name: str
    share: float
    stall_s: float | None = None


def by_cause(cost: RecoveryCost, causes: Sequence[Cause]) -> RecoveryCost:
    """With each failure of one of these causes, which all strategies have alike. Raises
    ScenarioError unless the shares sum to 1, within a millionth, and the names differ.
    """
    names = [one.name for one in causes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ScenarioError(f"cause {twice[0]} is given twice", hint="name each cause once")
    total = math.fsum(one.share for one in causes)
    if abs(total - 1.0) > 1e-6:
        raise ScenarioError(
            f"the shares of causes sum to {total:g}, not to 1",
            hint="such as --cause hardware=0.6:6m --cause software=0.4",
        )
    own = cost.stall if isinstance(cost.stall, Duration) else Duration(median_s=cost.stall.median_s)
    parts, said = [], []
    for one in causes:
        takes, where = cost.kinds.get(one.name, own), "as all"
        if one.stall_s is not None:
            takes, where = Duration(median_s=one.stall_s), "as given"
        elif one.name in cost.kinds:
            where = "as measured"
        parts.append((one.share / total, takes))
        said.append(f"{one.share:.1%} {one.name} {takes.median_s:.3g} s, {where}")
    return replace(cost, stall=Mixture(parts), source=f"{cost.source}; {'; '.join(said)}")


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
