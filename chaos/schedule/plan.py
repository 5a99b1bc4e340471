"""Plans when and where faults fire, as a pure function of the scenario and the seed.

Every choice is drawn from (seed, fault id) through SHA-256, so adding, removing or reordering other
faults does not change it, and a plan is the same on every machine and Python version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.scenario.fault import (
    DEFAULT_ARRIVALS,
    FaultSpec,
    MaxRetrigger,
    StepsDuration,
    TraceSpec,
    TriggerSpec,
)
from trainchaos.chaos.scenario.model import Scenario
from trainchaos.chaos.schedule.arrivals import arrival_times, draw, share
from trainchaos.chaos.schedule.targeting import Scope, TargetError, Targets, resolve

Point = tuple[int, str]

STEP_PHASES = ("data", "forward", "backward", "collective", "optimizer")
DEFAULT_PHASE = "data"
NO_POINT: Point = (0, "")
"""The point under which firings by an event are counted. It equals the point of a fault's first
time, (0, "").
"""
NEXT_STEP = 0
"""Step number of a point that means "the next step", whatever its number."""
EVERY_ATTEMPT_LIMIT = 1000
"""Firings of ``every_attempt``: bounded, so that a job that never gets past its fault ends."""


@dataclass(frozen=True, kw_only=True)
class PlannedFault:
    """One fault with every choice made.

    ``ranks``: worker ranks hit; ``spares``: indices of spares hit; ``nodes``; ``links``: directed
    (source rank, destination rank); ``checkpoint``: ``latest``, step, None. ``points``: (step,
    phase) pairs for triggers in steps, ``times_s`` for those in time, ``event`` with ``nth`` for
    those by event. ``max_fires``: firings per point, time or event (once = 1). ``probability`` is
    already decided for points, times and a single event; ``declined`` names those it ruled out.
    ``each``: targets of each of ``times_s``, drawn separately, the first equal to the fields above;
    empty if all hit the same targets. ``verify``: conditions on the landed evidence. ``seed``: the
    fault's own, below 2**32.
    """

    id: str
    kind: str
    params: Mapping[str, Any]
    ranks: tuple[int, ...]
    spares: tuple[int, ...]
    nodes: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    checkpoint: Literal["latest"] | int | None
    points: tuple[Point, ...]
    times_s: tuple[float, ...] = ()
    each: tuple[Targets, ...] = ()
    event: str | None
    nth: int
    probability: float = 1.0
    declined: tuple[str, ...] = ()
    duration_s: float | None
    duration_steps: int | None
    max_fires: int
    verify: Mapping[str, Any] = field(default_factory=dict)
    seed: int

    def aimed(self, point: Point) -> PlannedFault:
        """A copy with the targets of one of its times; ``point``: (number of the time, "")."""
        if not self.each:
            return self
        mine = self.each[point[0]]
        return dataclasses.replace(
            self, ranks=mine.ranks, spares=mine.spares, nodes=mine.nodes, links=mine.links
        )


def plan_scenario(
    scenario: Scenario, kinds: Mapping[str, type[Fault]], *, seed: int, spares: int
) -> tuple[PlannedFault, ...]:
    """Plan all faults of one arm. ``kinds``: name -> fault class; ``spares``: number of spares.

    Raises ScenarioError if a fault would have no target.
    """
    radius = scenario.blast_radius
    scope = Scope(
        topology=scenario.topology,
        spares=spares,
        protected=frozenset(radius.protected_ranks),
        sheltered=frozenset(radius.protected_nodes),
    )
    return plan(scenario.faults, kinds, scope, seed)


def plan(
    faults: Sequence[FaultSpec], kinds: Mapping[str, type[Fault]], scope: Scope, seed: int
) -> tuple[PlannedFault, ...]:
    """Decide every target, time and phase. Raises ScenarioError if a fault would have no target."""
    return tuple(_plan_one(fault, seed, scope, kinds[fault.kind]) for fault in faults)


def most_occurrences(at: TriggerSpec) -> int:
    """How often a trigger fires at most, without retriggers."""
    if at.mtbf is not None or at.weibull is not None:
        return at.max or DEFAULT_ARRIVALS
    times = at.trace.times if isinstance(at.trace, TraceSpec) else ()
    return max(1, len(at.all_steps()), len(times))


def repeat_seed(seed: int, repeat: int) -> int:
    """Seed of one repeat, below 2**32; the same in every cell, so that all strategies face the same
    faults.

    Repeat 0: ``seed``.
    """
    return seed if repeat == 0 else draw(seed, "repeat", repeat) % 2**32


def happens(probability: float, *words: str | int) -> bool:
    """Whether an event of this probability happens; the same for the same words."""
    return probability >= 1 or share(*words, "chance") < probability


def _plan_one(fault: FaultSpec, seed: int, scope: Scope, kind: type[Fault]) -> PlannedFault:
    at, checkpoint = fault.at, fault.target.checkpoint
    if isinstance(at.trace, str):
        raise ScenarioError(f"fault {fault.id!r}: trace {at.trace} has not been read")
    try:
        targets = resolve(fault, kind, scope, seed)
    except TargetError as error:
        raise _empty(fault, str(error)) from error
    own = draw(seed, fault.id, "seed") % 2**32
    chance = at.probability
    steps, times = at.all_steps(), arrival_times(at, seed, fault.id)
    event = at.event if not steps else None
    happening = [n for n in range(len(times)) if happens(chance, own, "time", n)]
    many = at.time is None and len(happening) > 1 and not kind.relentless
    declined = [f"step {step}" for step in steps if not happens(chance, own, "step", step)]
    declined += [
        f"{time:g} s" for n, time in enumerate(times) if not happens(chance, own, "time", n)
    ]
    if event is not None and not happens(chance, own, "event", at.nth):
        declined.append(f"{event} number {at.nth}")
    return PlannedFault(
        id=fault.id,
        kind=fault.kind,
        params=dict(fault.params),
        ranks=targets.ranks,
        spares=targets.spares,
        nodes=targets.nodes,
        links=targets.links,
        checkpoint=checkpoint if checkpoint is None or checkpoint == "latest" else checkpoint.step,
        points=tuple(
            (step, _phase(fault, step, seed, kind.phases))
            for step in steps
            if happens(chance, own, "step", step)
        ),
        times_s=tuple(times[n] for n in happening),
        each=tuple(resolve(fault, kind, scope, _arrival_seed(seed, n)) for n in happening)
        if many
        else (),
        event=event,
        nth=at.nth,
        probability=chance,
        declined=tuple(declined),
        duration_s=None if isinstance(fault.duration, StepsDuration) else fault.duration,
        duration_steps=fault.duration.steps if isinstance(fault.duration, StepsDuration) else None,
        max_fires=_max_fires(fault, kind),
        verify=dict(fault.verify),
        seed=own,
    )


def _arrival_seed(seed: int, number: int) -> int:
    """Seed of one arrival: targets are drawn again for each, as one machine does not suffer all
    failures of a fleet.
    """
    return seed if number == 0 else draw(seed, "arrival", number)


def _phase(fault: FaultSpec, step: int, seed: int, phases: tuple[str, ...]) -> str:
    wanted = fault.at.phase
    if wanted is None:
        return phases[0] if phases and DEFAULT_PHASE not in phases else DEFAULT_PHASE
    if wanted != "any":
        return wanted
    choices = [phase for phase in STEP_PHASES if not phases or phase in phases] or list(phases)
    return choices[draw(seed, fault.id, "phase", step) % len(choices)]


def _max_fires(fault: FaultSpec, kind: type[Fault]) -> int:
    if isinstance(fault.retrigger, MaxRetrigger):
        return fault.retrigger.max
    return 1 if fault.retrigger == "once" and not kind.relentless else EVERY_ATTEMPT_LIMIT


def _empty(fault: FaultSpec, reason: str) -> ScenarioError:
    return ScenarioError(
        f"fault {fault.id!r} has no target: {reason}", hint="change its target, or workload.ranks"
    )
