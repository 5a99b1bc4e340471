"""What stored runs say of one job under failures that come at random: its arms, and what each of
its failures cost. Times in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.scenario.fault import TriggerSpec
from trainchaos.chaos.scenario.model import Cell, ResolvedRun
from trainchaos.harness.host.rundir import open_run, read_resolved
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.harness.judge.verdict.judge import judge_whole
from trainchaos.harness.projection.arrivals import Law, Poisson, Weibull
from trainchaos.harness.projection.costs import PUBLISHED, alone, stall_of
from trainchaos.harness.projection.parallel import in_processes

OUTSIDE = ("initialisation", "shutdown", "spare_idle")
"""Classes of badput before the first step, after the last, and of processes that stand by."""
STALLED = ("detection", "regroup", "restore")
"""Classes of badput from a failure until the job trains again."""
PLAYED = (*STALLED, "recomputation", "degraded_world")
"""Classes of badput that a projection plays: what failures cost while they are recovered from."""
SAVING = "checkpoint_save"
WHOLE = "evidence-complete"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A run as it was judged again from its logs, and the scenario that it played."""

    path: Path
    results: Results
    resolved: ResolvedRun


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One arm from its first step to its last. ``active_s``: that time; ``goodput``: the share of
    it that was useful; ``failures``: acts that landed; ``stalled_s``, ``degraded_s``: time from
    failures until the job trained again, and lost because ranks were missing; ``step_s``: median;
    ``clear``: the useful share of the time that no recovery took.
    """

    run: str
    repeat: int
    active_s: float
    goodput: float
    failures: int
    stalled_s: float
    degraded_s: float
    step_s: float
    clear: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """All arms of one job: the same strategy, ranks and scenario. ``stalls_s``: of failures that
    came alone; ``away_s``: from each failure until as many could train or stand by as before, of
    those where that came before the arm's end.
    """

    cell: Cell
    faulted: tuple[Arm, ...]
    controls: tuple[Arm, ...]
    stalls_s: tuple[float, ...]
    away_s: tuple[float, ...]

    @property
    def strategy(self) -> str:
        """Its name."""
        return self.cell.scenario.recovery.strategy

    @property
    def ranks(self) -> int:
        """Ranks that train."""
        return self.cell.scenario.workload.ranks

    @property
    def failures(self) -> int:
        """Acts that landed, over all arms."""
        return sum(arm.failures for arm in self.faulted)


def read_stored(
    paths: Iterable[Path], each: Callable[[float], None] = lambda share: None, jobs: int = 1
) -> list[Stored]:
    """Judge runs again from their logs, in so many processes; ``each`` is told the share done.
    Raises ScenarioError (exit code 2) where one was simulated, an arm's log is not whole, or the
    runs are not all of one scenario, or one is there twice.
    """
    paths = [*paths]
    if len(paths) > 1:
        _refuse_together(paths)
    found = in_processes(paths, _read_one, each, jobs)
    for one in found:
        if one.results.simulated:
            raise ScenarioError(
                f"{one.path} was simulated: its times are not measured",
                hint="give runs of real ranks",
            )
    return found


def _refuse_together(paths: Sequence[Path]) -> None:
    """Runs that do not go together, before any is judged, which may take minutes."""
    first: dict[str, Path] = {}
    names = set[str]()
    for path in paths:
        run = open_run(path)
        resolved = read_resolved(run)
        run_id = resolved.run_id
        names.add(resolved.cells[0].scenario.name if resolved.cells else run.root.parent.name)
        if run_id in first:
            raise ScenarioError(
                f"{path} is the same run as {first[run_id]}: its recoveries would count twice",
                hint="give each run once",
            )
        first[run_id] = path
    if len(names) > 1:
        raise ScenarioError(
            f"the runs are of different scenarios: {', '.join(sorted(names))}",
            hint="project them one by one",
        )


def law_of_failures(cell: Cell) -> Law:
    """The law by which the scenario's one fault arrives, by the clock of the arm, from its first
    step on. Raises ScenarioError unless there is one fault, by ``mtbf`` or ``weibull``.
    """
    faults = cell.scenario.faults
    at = faults[0].at if len(faults) == 1 else None
    if isinstance(at, TriggerSpec) and at.probability == 1.0:
        if at.mtbf is not None:
            return Poisson(at.mtbf)
        if at.weibull is not None:
            return Weibull(at.weibull.mean, at.weibull.shape)
    raise ScenarioError(
        f"{cell.scenario.name}: {len(faults)} faults, where a projection needs one that comes at"
        " random",
        hint="give runs of a scenario with at: {mtbf: ...}, such as builtin:projection-mtbf",
    )


def _read_one(path: Path, each: Callable[[float], None]) -> Stored:
    run = open_run(path)
    results = judge_whole(run)
    each(1.0)
    broken = [
        arm.id
        for arm in results.arms
        if (log := arm.invariants.get(WHOLE)) is not None and log.verdict != "pass"
    ]
    if broken or not results.arms:
        raise ScenarioError(
            f"{path}: the log of {broken[0] if broken else 'every arm'} is not whole",
            hint="give a run that chaos analyze does not find fault with",
        )
    return Stored(path=path, results=results, resolved=read_resolved(run))


def groups(
    stored: Sequence[Stored], repeats: Sequence[int] | None = None
) -> dict[tuple[str, int], Group]:
    """The jobs of the runs, by cell and strategy's ranks; of faulted arms only those of
    ``repeats``, if given. Arms that did not complete are left out, see ``unfinished``.
    """
    cells: dict[tuple[str, int], Cell] = {}
    found: dict[tuple[str, int], dict[str, list[Arm]]] = defaultdict(lambda: defaultdict(list))
    stalls: dict[tuple[str, int], list[float]] = defaultdict(list)
    away: dict[tuple[str, int], list[float]] = defaultdict(list)
    for run in stored:
        for cell in _projectable(run):
            key = (cell.id, cell.scenario.workload.ranks)
            cells.setdefault(key, cell)
            for arm in run.results.arms:
                taken = arm.arm == "control" or repeats is None or arm.repeat in repeats
                if arm.cell != cell.id or not taken or arm.outcome != "completed":
                    continue
                incidents = _of(run.results, arm) if arm.arm == "faulted" else []
                found[key][arm.arm].append(_arm(run, cell, arm, incidents))
                stalls[key] += [s for one in alone(incidents) if (s := stall_of(one)) is not None]
                away[key] += [
                    s
                    for one in incidents
                    if (s := one.time_to_redundancy) is not None and math.isfinite(s)
                ]
    return {
        key: Group(
            cell=cell,
            faulted=tuple(found[key]["faulted"]),
            controls=tuple(found[key]["control"]),
            stalls_s=tuple(stalls[key]),
            away_s=tuple(away[key]),
        )
        for key, cell in cells.items()
    }


def steady(stored: Sequence[Stored]) -> tuple[float, float]:
    """Seconds of a step, and for which a checkpoint holds the job up: medians over the control arms
    of the runs. Raises ScenarioError where no control arm completed, or checkpoints come by time.
    """
    steps: list[float] = []
    saves: list[float] = []
    for run in stored:
        cells = {cell.id: cell.scenario.workload for cell in run.resolved.cells}
        for arm in run.results.arms:
            if arm.arm != "control" or arm.outcome != "completed" or not arm.step_time_median:
                continue
            every = cells[arm.cell].checkpoint.every
            if not isinstance(every, int):
                raise ScenarioError(
                    f"{run.path}: checkpoints come each {every}, so that their number is not known",
                    hint="give --step and --save",
                )
            steps.append(arm.step_time_median)
            share = cells[arm.cell].ranks / max(1, arm.provisioned_ranks)
            count = max(1, arm.steps // every)
            saves.append(arm.badput.get(SAVING, 0.0) / share / count)
    if not steps:
        raise ScenarioError(
            "no control arm of the runs says how long a step takes",
            hint="give --step and --save, or runs with baseline: paired",
        )
    return statistics.median(steps), statistics.median(saves)


def unfinished(stored: Sequence[Stored]) -> list[str]:
    """Arms that did not complete, and so have no goodput of the whole job."""
    return [
        f"{arm.id} ({arm.outcome})"
        for run in stored
        for cell in _projectable(run)
        for arm in run.results.arms
        if arm.cell == cell.id and arm.outcome != "completed"
    ]


def _projectable(run: Stored) -> Iterator[Cell]:
    for cell in run.resolved.cells:
        if cell.exact_for is None and cell.scenario.recovery.strategy in PUBLISHED:
            yield cell


def _of(results: Results, arm: ArmResult) -> list[Incident]:
    return [
        one
        for one in results.faults
        if one.cell == arm.cell and one.repeat == arm.repeat and one.fired
    ]


def _arm(run: Stored, cell: Cell, arm: ArmResult, incidents: Sequence[Incident]) -> Arm:
    """``badput`` is per provisioned rank; here per rank that trains."""
    share = cell.scenario.workload.ranks / max(1, arm.provisioned_ranks)
    inside = {name: s / share for name, s in arm.badput.items() if name not in OUTSIDE}
    useful_s = arm.useful_s / share
    active_s = useful_s + sum(inside.values())
    clear_s = active_s - math.fsum(inside.get(name, 0.0) for name in PLAYED)
    return Arm(
        run=run.results.run_id,
        repeat=arm.repeat,
        active_s=active_s,
        goodput=useful_s / active_s if active_s > 0 else 0.0,
        failures=sum(one.landed for one in incidents),
        stalled_s=math.fsum(inside.get(name, 0.0) for name in STALLED),
        degraded_s=inside.get("degraded_world", 0.0),
        step_s=arm.step_time_median or 0.0,
        clear=min(1.0, useful_s / clear_s) if clear_s > 0 else 0.0,
    )


def spread(values: Sequence[float]) -> float:
    """Standard deviation; 0 of fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else 0.0
