"""Reads the logs of a run, and judges each arm by itself."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.log import Kind, Log, SenselessLog, read_log
from trainchaos.chaos.plugins import STRATEGIES, load
from trainchaos.chaos.scenario.model import Cell, ResolvedRun, Scenario
from trainchaos.harness.host.rundir import RunDirectory, arm_id
from trainchaos.harness.judge.checkers import Evidence, check_all
from trainchaos.harness.judge.checkers.job.loss import compare
from trainchaos.harness.judge.evidence.expected import expected_of
from trainchaos.harness.judge.measure.measure import ArmMeasures
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.record.whole import broken
from trainchaos.harness.judge.results import Finding
from trainchaos.recovery.policy.strategy import Strategy


@contextmanager
def logs_of(
    run: RunDirectory, resolved: ResolvedRun
) -> Iterator[tuple[dict[str, Log], dict[str, str]]]:
    """(arm -> log, arm -> why its log was not read), for arms that at least started, all read at
    the expense of one budget, and let go at the end.

    Meanwhile nothing is looked for that refers to itself in a circle: each search looks at all
    events, and judging makes no such circle but of a log with what is derived from it, which is
    broken at the end.
    """
    searched = gc.isenabled()
    gc.disable()
    logs: dict[str, Log] = {}
    try:
        logs, unread = _read(run, resolved)
        yield logs, unread
    finally:
        for log in logs.values():
            log.forget()
        logs.clear()
        if searched:
            gc.enable()


def unplanned(run: RunDirectory, resolved: ResolvedRun) -> list[str]:
    """Arms that left events, and that the scenario does not plan."""
    planned = {name for cell in resolved.cells for name, _, _ in planned_arms(cell)}
    with suppress(OSError):
        return [name for name in run.arms() if name not in planned]
    return []


def _read(run: RunDirectory, resolved: ResolvedRun) -> tuple[dict[str, Log], dict[str, str]]:
    """(arm -> log, arm -> why its log was not read), for arms that at least started. All logs share
    one read budget.
    """
    budget = Budget()
    logs, unread = {}, {}
    for cell in resolved.cells:
        for name, _, _ in planned_arms(cell):
            try:
                log = read_log(run.events(name), budget)
            except SenselessLog as error:
                unread[name] = error.message
                continue
            except LogError:
                continue
            if log.unread:
                unread[name] = log.unread
            elif log.first(Kind.RUN_STARTED) is not None:
                logs[name] = log
            elif lost := broken(log):
                unread[name] = f"the record is not whole: {next(iter(lost.values()))}"
    return logs, unread


MOST_SAID = 500
ARMS: tuple[Literal["faulted"], Literal["control"]] = ("faulted", "control")
FACTOR = 100
"""Allowed multiple of what the scenario says; ``identity`` reports smaller deviations."""
LEAST = 1000
MOST_GENERATIONS = 1_000_000
MOST_SAMPLES = 2**48


@dataclass(frozen=True, kw_only=True)
class JudgedArm:
    """One judged arm with a usable log."""

    id: str
    cell: Cell
    repeat: int
    arm: Literal["faulted", "control"]
    evidence: Evidence
    measures: ArmMeasures
    findings: Mapping[str, Finding]
    exactness: str

    @property
    def lost(self) -> Mapping[str, str]:
        """Actor -> why its record is not whole; figures are taken from arms without such alone."""
        return broken(self.evidence.log)


def planned_arms(cell: Cell) -> list[tuple[str, int, Literal["faulted", "control"]]]:
    """Planned arms of a cell: (id, repeat, faulted or control)."""
    wanted = ARMS if cell.scenario.baseline == "paired" else ARMS[:1]
    return [
        (arm_id(cell.id, n, arm), n, arm) for n in range(cell.scenario.repeat) for arm in wanted
    ]


def judge_arms(
    resolved: ResolvedRun, logs: Mapping[str, Log], complete: Callable[[JudgedArm], None]
) -> tuple[list[JudgedArm], dict[str, str]]:
    """Judged arms that have a log, and arm id -> reason for those whose log makes no sense (a file
    may contain anything). ``complete`` runs everything that is later derived from an arm, so that
    its errors show here.
    """
    exact = {name: kind.exact for name, kind in load(STRATEGIES, Strategy).items()}
    arms: list[JudgedArm] = []
    senseless: dict[str, str] = {}
    for cell in resolved.cells:  # control arms too, which others are compared with
        for name in (name for name, *_ in planned_arms(cell) if name in logs):
            try:
                if absurd := absurdity(logs[name], cell.scenario):
                    raise ValueError(absurd)
                history_of(logs[name])
            except Exception as error:
                senseless[name] = _no_sense(error, logs[name])
    logs = {name: log for name, log in logs.items() if name not in senseless}
    for cell in resolved.cells:
        alike = [one for one in resolved.cells if one.scenario.workload == cell.scenario.workload]
        planned = [name for one in alike for name, _, arm in planned_arms(one) if arm == "control"]
        controls = tuple(logs[n] for n in planned if n in logs and not broken(logs[n]))
        for name, repeat, arm in planned_arms(cell):
            if name not in logs:
                continue
            control = logs.get(arm_id(cell.id, repeat, "control")) if arm == "faulted" else None
            if control and (broken(control) or not history_of(control).committed_step):
                control = None  # it committed nothing to compare with
            try:
                evidence = Evidence(
                    arm=arm,
                    cell=cell,
                    log=logs[name],
                    control=control,
                    controls=controls,
                    exact=exact,
                    source=resolved.source,
                    lines=resolved.lines,
                    expected=expected_of(resolved, cell, repeat, arm),
                )
                one = JudgedArm(
                    id=name,
                    cell=cell,
                    repeat=repeat,
                    arm=arm,
                    evidence=evidence,
                    measures=evidence.measures,
                    findings=check_all(evidence),
                    exactness=_exactness(evidence),
                )
                complete(one)
            except Exception as error:
                senseless[name] = _no_sense(error, logs[name])
            else:
                arms.append(one)
    return arms, senseless


def _no_sense(error: Exception, log: Log) -> str:
    for why in broken(log).values():
        return f"the record is not whole: {why}"
    return f"what it holds makes no sense: {type(error).__name__}: {error}"[:MOST_SAID]


def _exactness(evidence: Evidence) -> str:
    """How the arm's result compares with its control's. A job that did not finish has no result,
    and a command does not show its own.
    """
    history = evidence.history
    if broken(evidence.log) or history.outcome != "completed" or history.info.observed:
        return "not compared"
    try:
        return compare(evidence)[0]
    except Exception:
        return "not compared"


def absurdity(log: Log, scenario: Scenario) -> str:
    """Why the size of the job in a log makes no sense; "" if it does."""
    started = log.first(Kind.RUN_STARTED)
    work = scenario.workload
    said: dict[str, Any] = dict(started.data) if started is not None else {}
    for name in ("ranks", "spares", "steps", "global_batch"):
        most = FACTOR * max(LEAST, int(getattr(work, name, 0) or 0))
        if not _within(said.get(name), most):
            return f"run_started names {said.get(name)!r:.40} {name}"
    order = said.get("order")
    if order is not None and not (
        isinstance(order, dict) and _within(order.get("samples"), MOST_SAMPLES)
    ):
        return f"run_started names the order {order!r:.40}"
    limits = {"step": FACTOR * max(LEAST, work.steps), "generation": MOST_GENERATIONS}
    for actor in log.actors.values():
        given = {"step": [s for s in actor.steps if s is not None], "generation": actor.generations}
        for name, numbers in given.items():
            for number in (min(numbers, default=0), max(numbers, default=0)):
                if not _within(number, limits[name]):
                    return f"an event of {actor.actor} is of {name} {number!r:.40}"
    return ""


def _within(value: Any, most: int) -> bool:
    return value is None or (type(value) is int and 0 <= value <= most)
