"""Whether the log is this arm's: its cell, strategy and seed, with the processes and faults it
should have.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers.record.aimed import aimed
from trainchaos.harness.judge.checkers.record.named import named
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, some, unknown
from trainchaos.harness.judge.record.history import NS
from trainchaos.harness.judge.results import Finding

AT_ONCE_S = 0.1
"""Within which the hits of one act are logged: they are commanded one after the other."""

_PARTS = {
    "target": ("ranks", "spares", "nodes", "links", "checkpoint", "each"),
    "at": ("points", "times_s", "event", "nth", "declined"),
}
"""Parts of a plan that the seed decides."""


def identity(evidence: Evidence) -> Finding:
    """The log describes itself as the resolved scenario describes the arm, no other arm has the
    same content, the promised number of ranks and spares was started, the faults are those that the
    seed draws, at the drawn places and times, and alarms name places that the job has.
    """
    expected = evidence.expected
    problems = [f"its log is that of {other}, under another name" for other in expected.twins]
    problems += [*_settings(evidence), *named(evidence)]
    if not evidence.history.info.observed:
        problems += list(_provisioned(evidence))
    if expected.plan is not None:
        plan = _drawn(evidence, expected.plan)
        problems += list(_planned(evidence, plan))
        problems += list(_injected(evidence, plan))
        problems += list(_acts(evidence))
    if problems:
        return failed(some(problems))
    if expected.problem:
        return unknown(f"what this arm should be is not known here: {expected.problem}")
    info = evidence.history.info
    faults = f", {len(expected.plan)} faults as drawn" if expected.plan else ""
    return passed(
        f"{info.arm} of {info.cell}, repeat {info.repeat}, seed {info.seed}:"
        f" {info.strategy}{faults}"
    )


def _settings(evidence: Evidence) -> Iterator[str]:
    started = evidence.log.first(Kind.RUN_STARTED)
    said: Mapping[str, Any] = started.data if started else {}
    cell, expected = evidence.cell, evidence.expected
    spec = cell.scenario.workload
    due = {
        "arm": evidence.arm,
        "cell": cell.id,
        "repeat": expected.repeat,
        "seed": expected.seed,
        "strategy": cell.scenario.recovery.strategy,
        "ranks": spec.ranks,
        "spares": expected.spares,
        "steps": spec.steps,
        "global_batch": spec.global_batch,
        "launcher": cell.scenario.launcher.kind,
        "evaluate": spec.evaluate.due if spec.evaluate else {},
        "monitored": True,
    }
    for name, value in due.items():
        if value is not None and said.get(name, value) != value:
            yield f"the log says {name} {said[name]}, the scenario {value}"


def _provisioned(evidence: Evidence) -> Iterator[str]:
    """Ranks and spares started for the first generation match what was provisioned."""
    log, info, expected = evidence.log, evidence.history.info, evidence.expected
    first = log.first(Kind.GENERATION_STARTED)
    if first is None:
        return
    roles = Counter(
        e.data["role"] for e in log.of(Kind.PROCESS_SPAWNED) if e.time_ns <= first.time_ns
    )
    if roles["worker"] != info.ranks:
        yield f"{roles['worker']} ranks were started at first, provisioned are {info.ranks}"
    if expected.spares is not None and roles["spare"] != expected.spares:
        yield (
            f"{roles['spare']} spares were started at first, the strategy holds {expected.spares}"
            " ready"
        )


def _drawn(
    evidence: Evidence, plan: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Mapping[str, Any]]:
    """The plan; a fault on one rank of a replica replaces the drawn one where it was announced and
    is an allowed alternative.
    """
    found = dict(plan)
    for event in evidence.log.of(Kind.FAULT_PLANNED):
        other = evidence.expected.or_else.get(event.data["fault"])
        if other is not None and _plain(event.data["target"]) == other["target"]:
            found[event.data["fault"]] = other
    return found


def _planned(evidence: Evidence, plan: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    announced = list(evidence.log.of(Kind.FAULT_PLANNED))
    for event in announced:
        name = event.data["fault"]
        if name not in plan:
            yield f"fault {name} is announced, and is not of this arm"
            continue
        if event.data["kind"] != plan[name]["kind"]:
            yield f"fault {name} is announced as {event.data['kind']}, and is {plan[name]['kind']}"
        for part, keys in _PARTS.items():
            said = event.data[part] or {}
            for key in keys:
                drawn = plan[name][part][key]
                if key in said and _plain(said[key]) != drawn:
                    yield (
                        f"{part}.{key} of {name} is {said[key]} in the log, and the seed draws"
                        f" {drawn}"
                    )
    missing = plan.keys() - {event.data["fault"] for event in announced}
    if evidence.history.runs:
        yield from (f"fault {name} was never announced" for name in sorted(missing))


def _injected(evidence: Evidence, plan: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    fired: Counter[str] = Counter()
    numbers = Counter(
        (event.kind.value.removeprefix("fault_"), event.data["fault"], event.data["occurrence"])
        for event in evidence.log.of(Kind.FAULT_INJECTED, Kind.FAULT_LANDED)
    )
    for (what, name, number), times in numbers.items():
        if times > 1:
            yield f"occurrence {number} of {name} {what} {times} times"
    acted = {(name, number) for what, name, number in numbers if what == "injected"}
    for event in evidence.log.of(Kind.FAULT_EFFECT, Kind.FAULT_LANDED, Kind.FAULT_HEALED):
        if (key := (event.data["fault"], event.data["occurrence"])) not in acted:
            yield f"{event.kind.value} of occurrence {key[1]} of {key[0]}, which was never injected"
    for one, then in itertools.pairwise(evidence.log.of(Kind.FAULT_INJECTED)):
        name, number = then.data["fault"], then.data["occurrence"]
        if name == one.data["fault"] and number < one.data["occurrence"]:
            yield f"occurrence {number} of {name} came after occurrence {one.data['occurrence']}"
    failed_ones = {
        (e.data["fault"], e.data["occurrence"]) for e in evidence.log.of(Kind.FAULT_FAILED)
    }
    for event in evidence.log.of(Kind.FAULT_INJECTED):
        name = event.data["fault"]
        fired[name] += 1
        if name not in plan:
            yield f"{name} was injected, and is not a fault of this arm"
        elif event.data["kind"] != plan[name]["kind"]:
            yield f"{name} was injected as {event.data['kind']}, and is {plan[name]['kind']}"
        else:
            missed = (name, event.data["occurrence"]) in failed_ones
            yield from aimed(evidence, event, plan[name], missed=missed)
    void = Counter(
        e.data["fault"] for e in evidence.log.of(Kind.FAULT_FAILED) if e.data.get("again")
    )
    for name, most in (evidence.expected.most or {}).items():
        if fired[name] - void[name] > most:
            yield f"{name} was injected {fired[name]} times, {most} are planned"


def _acts(evidence: Evidence) -> Iterator[str]:
    """Hits logged as one act were one act, and hits on several targets at once are logged as one:
    incidents are counted by act.
    """
    log = evidence.log
    plans = {event.data["fault"]: event.data["at"] or {} for event in log.of(Kind.FAULT_PLANNED)}
    # A fault that was armed again keeps its act number, whatever it hits.
    again = {event.data["fault"] for event in log.of(Kind.FAULT_FAILED) if event.data.get("again")}
    steps: dict[tuple[str, int], int] = {}
    acts: dict[tuple[str, int, int], tuple[int, int]] = {}
    hit: set[tuple[str, int, str]] = set()
    for event in log.of(Kind.FAULT_INJECTED):
        name, number = event.data["fault"], event.data["occurrence"]
        act, step = event.data.get("act"), event.step
        if act is None:
            continue
        if not 0 <= act <= number:
            yield f"occurrence {number} of {name} is said to be of act {act}, which came later"
        target = json.dumps(event.data["target"], sort_keys=True)
        if (name, act, target) in hit and name not in again:
            yield f"act {act} of {name} is said to have hit the same twice"
        hit.add((name, act, target))
        due = [point[0] for point in plans.get(name, {}).get("points") or ()]
        if (
            name in again
            or step is None
            or due.count(step) != 1
            or "checkpoint" in (event.data["target"] or {})
        ):
            continue
        if (other := steps.setdefault((name, act), step)) != step:
            yield f"{name} in step {other} and in step {step} is said to be one act"
        first, since_ns = acts.setdefault((name, event.generation, step), (act, event.time_ns))
        # A rank that comes to its point after the others have been hit is another act.
        at_once = event.time_ns - since_ns < AT_ONCE_S * NS
        if plans[name].get("fires") == 1 and first != act and at_once:
            yield f"{name} hit several at once in step {step}, and is said to be several acts"


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
