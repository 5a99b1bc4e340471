"""Warnings about scenarios that are valid but will surprise their authors."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainchaos.chaos.fault.base import Where
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.chaos.scenario.fault import StepsDuration
from trainchaos.chaos.scenario.model import CheckpointTargetSpec, FaultSpec, Scenario
from trainchaos.chaos.scenario.steady import parse_steady
from trainchaos.chaos.schedule.arrivals import arrival_times
from trainchaos.chaos.source.diagnostics import Loc, Problem

HEALTHY_STEPS = 5
"""Steps that the liveness checker needs after the last fault."""
SLOW_STEP_S = 60.0
"""Longer than a step takes, unless a scenario is about something else."""


def warnings(scenario: Scenario, catalogue: Catalogue) -> Iterator[Problem]:
    """Warnings about valid parts of a scenario that will surprise."""
    if not scenario.faults:
        yield Problem(("faults",), "no faults: the run can only be inconclusive", on_key=True)
    yield from _empty_nodes(scenario, catalogue)
    yield from _never_steady(scenario)
    steps = scenario.workload.steps
    for index, fault in enumerate(scenario.faults):
        yield from _too_late(fault, steps, ("faults", index, "at"), scenario.invariants)
        yield from _never_due(fault, scenario, ("faults", index, "at"))
        yield from _no_save(fault, scenario, catalogue, ("faults", index))
        if (
            fault.retrigger != "once"
            and fault.at.time is None
            and not fault.at.all_steps()
            and not fault.at.event
        ):
            message = (
                "times of mtbf, weibull and trace are not replayed: each would fire again after"
                " every rollback"
            )
            yield Problem(("faults", index, "retrigger"), message)
        target, every = fault.target.checkpoint, scenario.workload.checkpoint.steps
        if isinstance(target, CheckpointTargetSpec) and every and target.step % every:
            message = (
                f"no checkpoint is made at step {target.step}: one is made every {every} steps"
            )
            yield Problem(("faults", index, "target", "checkpoint", "step"), message)


def _too_late(fault: FaultSpec, steps: int, loc: Loc, invariants: object) -> Iterator[Problem]:
    """A fault past the end, or too late to leave enough steps that show a healthy job."""
    points = fault.at.all_steps()
    if not points:
        return
    names = ("step", "steps", "until", "trace", "nth")
    at = (*loc, next(name for name in names if getattr(fault.at, name) is not None))
    past = [step for step in points if step > steps]
    if past:
        message = (
            f"fault {fault.id!r} is due at step {past[0]}, but the run ends at step {steps}: it"
            " would be inconclusive; lower at.step or raise workload.steps"
        )
        yield Problem(at, message)
        return
    last = points[-1] + (fault.duration.steps if isinstance(fault.duration, StepsDuration) else 0)
    judged = isinstance(invariants, str) or (
        isinstance(invariants, list) and "liveness" in invariants
    )
    if judged and steps - last < HEALTHY_STEPS:
        message = (
            f"fault {fault.id!r} leaves {max(0, steps - last)} steps before the end at step"
            f" {steps}, and liveness needs {HEALTHY_STEPS} healthy ones: raise workload.steps to"
            f" {last + HEALTHY_STEPS} or more"
        )
        yield Problem(at, message)


def _never_due(fault: FaultSpec, scenario: Scenario, loc: Loc) -> Iterator[Problem]:
    """A fault that its probability rules out, or whose first time comes long after the run has
    ended.
    """
    at, steps = fault.at, scenario.workload.steps
    if at.probability == 0:
        message = f"fault {fault.id!r} never fires: its probability is 0"
        yield Problem((*loc, "probability"), message)
        return
    name = next(
        (key for key in ("time", "mtbf", "weibull", "trace") if getattr(at, key) is not None), None
    )
    if name is None or at.all_steps():
        return
    first = next(iter(arrival_times(at, scenario.seed, fault.id)), None)
    if first is None or first > steps * SLOW_STEP_S:
        when = "never due" if first is None else f"first due {first:g} s after the first step"
        message = f"fault {fault.id!r} is {when}: {steps} steps hardly take so long"
        yield Problem((*loc, name), message)


def _no_save(
    fault: FaultSpec, scenario: Scenario, catalogue: Catalogue, loc: Loc
) -> Iterator[Problem]:
    """A fault in saving that ends before the first save."""
    kind, every = catalogue.faults.get(fault.kind), scenario.workload.checkpoint.steps
    saves = kind is not None and (kind.where is Where.STORAGE or kind.on_saves)
    points = fault.at.all_steps()
    if (
        not saves
        or not every
        or scenario.workload.command
        or not points
        or not isinstance(fault.duration, StepsDuration)
    ):
        return
    last = fault.duration.steps
    if all((step + last) // every == (step - 1) // every for step in points):
        message = (
            f"no rank saves in steps {points[0]} to {points[0] + last - 1}, so {fault.kind} changes"
            f" nothing: a checkpoint is made every {every} steps"
        )
        yield Problem((*loc, "duration"), message)


def _empty_nodes(scenario: Scenario, catalogue: Catalogue) -> Iterator[Problem]:
    place, strategy = scenario.topology, catalogue.strategies.get(scenario.recovery.strategy)
    held = set(range(place.node_of(place.ranks - 1) + 1))
    spares = 0
    if strategy is not None:
        spares = int(getattr(strategy(**scenario.recovery.params), "spares_wanted", 0))
        held |= {place.node_of_spare(index) for index in range(spares)}
    empty = sorted(set(range(place.nodes)) - held)
    if empty:
        who = f"{place.ranks} ranks" + (f" and spares ({spares})" if spares else "")
        message = f"node {empty[0]} is empty: {who} take {len(held)} of {place.nodes} nodes"
        yield Problem(("launcher", "nodes"), message)


def _never_steady(scenario: Scenario) -> Iterator[Problem]:
    """A steady state that the run cannot reach before its first fault."""
    certain = [step for f in scenario.faults if f.at.probability == 1 for step in f.at.all_steps()]
    steps = min([scenario.workload.steps, *(step - 1 for step in certain)])
    most = {"committed_steps": steps, "healthy_replicas": scenario.topology.replicas}
    for index, check in enumerate(scenario.steady_state):
        rule = parse_steady(check.check)
        best = most.get(rule.name, math.inf)
        if (
            rule.holds(best)
            or rule.op not in (">=", ">", "==")
            or (rule.op == "==" and rule.limit <= best)
        ):
            continue
        message = (
            f"there are never more than {best} {rule.name} before the first fault: it would be"
            " inconclusive"
        )
        yield Problem(("steady_state", index), message)
