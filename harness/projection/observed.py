"""What stored runs say of one job under failures that come at random: its arms, and what each of
its failures cost. Times in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.scenario.fault import TriggerSpec
from trainchaos.chaos.scenario.model import Cell, ResolvedRun
from trainchaos.harness.host.rundir import open_run, read_resolved
from trainchaos.harness.judge.incident import Incident
from trainchaos.harness.judge.results import ArmResult, Results
from trainchaos.harness.judge.verdict.judge import judge_whole
from trainchaos.harness.projection.costs import PUBLISHED, alone, stall_of
from trainchaos.harness.projection.laws import Law, Weibull
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
    """One arm from its first step to its last. ``goodput``: the share of that time that was useful;
    ``failures``: acts that landed; ``stalled_s``, ``degraded_s``: time from failures until the job
    trained again, and lost because ranks were missing; ``step_s``: median; ``clear``: the useful
    share of the time that no recovery took.
    """

    run: str
    repeat: int
    goodput: float
    failures: int
    stalled_s: float
    degraded_s: float
    step_s: float
    clear: float


@dataclass(kw_only=True)
class Group:
    """All arms of one job: the same strategy, ranks and scenario. ``stalls_s``: of failures that
    came alone; ``away_s``: from each failure until as many could train or stand by as before, of
    those where that came before the arm's end.
    """

    cell: Cell
    faulted: list[Arm] = field(default_factory=list)
    controls: list[Arm] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    away_s: list[float] = field(default_factory=list)

    @property
    def strategy(self) -> str:
        """Its name."""
        return self.cell.scenario.recovery.strategy

    @property
    def ranks(self) -> int:
        """Ranks that train."""
        return self.cell.scenario.workload.ranks

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.strategy} at {self.ranks} ranks"

    @property
    def failures(self) -> int:
        """Acts that landed, over all arms."""
        return sum(arm.failures for arm in self.faulted)

    @property
    def undisturbed(self) -> float:
        """Mean goodput of the control arms."""
        return statistics.fmean(arm.goodput for arm in self.controls)


def read_stored(
    paths: Iterable[Path], each: Callable[[float], None] = lambda share: None, jobs: int = 1
) -> list[Stored]:
    """Judge runs again from their logs, in so many processes; ``each`` is told the share done.
    Raises ScenarioError (exit code 2) where one was simulated, an arm's log is not whole, or the
    runs are not all of one scenario, or one is there twice.
    """
    paths = [*paths]
    first: dict[str, Path] = {}
    names = set[str]()
    for path in paths if len(paths) > 1 else ():  # before any is judged, which may take minutes
        run = open_run(path)
        resolved = read_resolved(run)
        names.add(resolved.cells[0].scenario.name if resolved.cells else run.root.parent.name)
        if (same := first.setdefault(resolved.run_id, path)) is not path:
            raise ScenarioError(
                f"{path} is the same run as {same}: its recoveries would count twice",
                hint="give each run once",
            )
    refuse_several(names, "project them one by one")
    return in_processes(paths, _read_one, each, jobs)


def refuse_several(names: set[str], hint: str) -> None:
    """Raises ScenarioError unless runs are of one scenario."""
    if len(names) > 1:
        raise ScenarioError(
            f"the runs are of different scenarios: {', '.join(sorted(names))}", hint=hint
        )


def _read_one(path: Path) -> Stored:
    run = open_run(path)
    results = judge_whole(run)
    if results.simulated:
        raise ScenarioError(
            f"{path} was simulated: its times are not measured", hint="give runs of real ranks"
        )
    broken = [
        arm.id
        for arm in results.arms
        if WHOLE in arm.invariants and arm.invariants[WHOLE].verdict != "pass"
    ]
    if broken or not results.arms:
        raise ScenarioError(
            f"{path}: the log of {broken[0] if broken else 'every arm'} is not whole",
            hint="give a run that chaos analyze does not find fault with",
        )
    return Stored(path=path, results=results, resolved=read_resolved(run))


def law_of_failures(cell: Cell) -> Law:
    """The law by which the scenario's one fault arrives, by the clock of the arm, from its first
    step on. Raises ScenarioError unless there is one fault, by ``mtbf`` or ``weibull``.
    """
    faults = cell.scenario.faults
    at = faults[0].at if len(faults) == 1 else None
    if isinstance(at, TriggerSpec) and at.probability == 1.0:
        if at.mtbf is not None:
            return Weibull(at.mtbf)
        if at.weibull is not None:
            return Weibull(at.weibull.mean, at.weibull.shape)
    raise ScenarioError(
        f"{cell.scenario.name}: {len(faults)} faults, where a projection needs one that comes at"
        " random",
        hint="give runs of a scenario with at: {mtbf: ...}, such as builtin:projection-mtbf",
    )


def groups(
    stored: Sequence[Stored], repeats: Sequence[int] | None = None
) -> dict[tuple[str, int], Group]:
    """The jobs of the runs, by cell and strategy's ranks; of faulted arms only those of
    ``repeats``, if given. Arms that did not complete are left out, see ``unfinished``.
    """
    found: dict[tuple[str, int], Group] = {}
    for run in stored:
        for cell in _projectable(run):
            group = found.setdefault((cell.id, cell.scenario.workload.ranks), Group(cell=cell))
            for arm in run.results.arms:
                if arm.cell == cell.id and arm.outcome == "completed":
                    if arm.arm == "control":
                        group.controls.append(_arm(run, cell, arm, []))
                    elif repeats is None or arm.repeat in repeats:
                        _add(group, run, arm)
    return found


def _add(group: Group, run: Stored, arm: ArmResult) -> None:
    incidents = [
        incident
        for incident in run.results.faults
        if (incident.cell, incident.repeat) == (arm.cell, arm.repeat) and incident.fired
    ]
    group.faulted.append(_arm(run, group.cell, arm, incidents))
    stalls = (stall_of(incident) for incident in alone(incidents))
    group.stalls_s += [stall_s for stall_s in stalls if stall_s is not None]
    away = (incident.time_to_redundancy for incident in incidents)
    group.away_s += [s for s in away if s is not None and math.isfinite(s)]


def _projectable(run: Stored) -> Iterator[Cell]:
    for cell in run.resolved.cells:
        if cell.exact_for is None and cell.scenario.recovery.strategy in PUBLISHED:
            yield cell


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
        goodput=useful_s / active_s if active_s > 0 else 0.0,
        failures=sum(incident.landed for incident in incidents),
        stalled_s=math.fsum(inside.get(name, 0.0) for name in STALLED),
        degraded_s=inside.get("degraded_world", 0.0),
        step_s=arm.step_time_median or 0.0,
        clear=min(1.0, useful_s / clear_s) if clear_s > 0 else 0.0,
    )


def unfinished(stored: Sequence[Stored]) -> list[str]:
    """Arms that did not complete, and so have no goodput of the whole job."""
    return [
        f"{arm.id} ({arm.outcome})"
        for run in stored
        for cell in _projectable(run)
        for arm in run.results.arms
        if arm.cell == cell.id and arm.outcome != "completed"
    ]


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
            saves.append(arm.badput.get(SAVING, 0.0) / share / max(1, arm.steps // every))
    if not steps:
        raise ScenarioError(
            "no control arm of the runs says how long a step takes",
            hint="give --step and --save, or runs with baseline: paired",
        )
    return statistics.median(steps), statistics.median(saves)
