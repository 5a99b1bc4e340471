"""Runs a whole scenario: every cell, repeat and arm, then judgement and reports."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainchaos.chaos import plugins
from trainchaos.chaos.errors import (
    EXIT_HARNESS,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    ChaosError,
    DamagedRun,
    InfrastructureError,
    ScenarioError,
)
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.loading.load import LoadedScenario
from trainchaos.chaos.scenario.model import Cell, ResolvedRun, SkippedCell, WorkloadSpec
from trainchaos.chaos.schedule.plan import repeat_seed
from trainchaos.harness.arm import pressure
from trainchaos.harness.arm.observer import Watcher
from trainchaos.harness.host.rundir import (
    RunDirectory,
    arm_id,
    create_run,
    point_latest,
    write_resolved,
)
from trainchaos.harness.host.seal import Sealer
from trainchaos.harness.host.slurm_facts import end_notice
from trainchaos.harness.judge.results import Results
from trainchaos.harness.judge.verdict import judge
from trainchaos.harness.launch import devices
from trainchaos.harness.launch.capabilities import too_small
from trainchaos.harness.launch.launcher import ArmSetup, Launcher, Session, Stopped
from trainchaos.harness.launch.requirements import lacking, refuse_impossible
from trainchaos.harness.launch.workload import DataInfo, Workload
from trainchaos.harness.run import heal, interrupts
from trainchaos.harness.run.orchestrator import Orchestrator, refuse_clashing
from trainchaos.harness.run.progress import SilentWatcher, progress, tell_judging
from trainchaos.harness.script.arm import ScriptArm
from trainchaos.harness.script.processes.environment import refuse_unstartable
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.records import RemoveTree
from trainchaos.recovery.policy.strategy import Strategy
from trainchaos.recovery.supervise.supervision import StopFlag

OVER = ("completed", "interrupted")
"""Outcomes of a command's arm whose scratch directory nobody needs. After others it shows why the
command failed.
"""
KEPT = "kept, as the command did not end well"


def run_scenario(
    loaded: LoadedScenario,
    *,
    runs: Path,
    seed: int | None,
    live: bool,
    argv: Sequence[str],
    launcher: str | None = None,
    only: Sequence[str] = (),
    watcher: Watcher | None = None,
    busy: str = "",
) -> Results:
    """Run it and return the judged results, which are in the run directory too; reports are the
    caller's to render.

    ``seed``: instead of the scenario's; ``live``: show progress; ``only``: cell ids to run (empty:
    all); ``argv``: the command line, kept for reproduction; ``busy``: what else used this machine
    as it began, for people. After SIGINT or SIGTERM the run heals, judges what was measured so far,
    and ends. An error while arms run ends the run; what was logged
    is judged. Raises InfrastructureError when the machine refuses before that, ScenarioError when
    the data does.
    """
    cells = [_with_launcher(cell, launcher) for cell in loaded.cells if cell.among(only)]
    base_seed = cells[0].scenario.seed if seed is None else seed
    for cell in cells:
        _launcher(cell).check(cell)
        refuse_impossible(cell, _launcher(cell))
        refuse_clashing(cell.scenario)
        refuse_unstartable(cell, f"{loaded.path}:{loaded.lines.get('workload.command', 1)}")
    runnable, skipped = _split(cells)
    now = datetime.now(UTC)
    run = create_run(runs, loaded.name, base_seed, now)
    resolved = ResolvedRun(
        run_id=run.root.name,
        source=str(loaded.path),
        started=now.isoformat(timespec="seconds"),
        reproduce=_reproduce(argv, base_seed),
        seed=base_seed,
        cells=runnable,
        skipped=skipped,
        sla_lines=loaded.sla_lines,
        lines=loaded.lines,
    )
    stop, problem, sealer = StopFlag(), None, Sealer(run)
    with interrupts.stop_on_signal(stop, run), heal.guarded(run):
        data = _prepare(run, runnable, resolved, busy)
        if runnable:
            with _watching(watcher, live, loaded, runnable) as shown:
                try:
                    _play(run, runnable, data, base_seed, shown, stop, sealer)
                except Exception as error:
                    problem = error
    sealer.close()
    if live:
        tell_judging(run)
    results = _or_broken(_or_interrupted(_judged(run), stop), problem)
    judge.write_results(run, results)
    if problem is not None and not isinstance(problem, ChaosError):
        raise problem  # a defect of the harness: it needs its traceback
    return results


def _prepare(
    run: RunDirectory, cells: Sequence[Cell], resolved: ResolvedRun, busy: str
) -> dict[str, DataInfo]:
    """Prepare data and facts. An error leaves no run directory behind, since there would be nothing
    in it to analyze.
    """
    try:
        data = _prepare_all(cells, run)
        _write_facts(run, resolved, busy)
        point_latest(run)
    except Exception:
        shutil.rmtree(run.root, ignore_errors=True)
        raise
    return data


def _judged(run: RunDirectory) -> Results:
    """Judge the run that was just played. What it wrote is no input of anyone's: where it cannot be
    read back, the machine failed.
    """
    try:
        return judge.judge(run)
    except DamagedRun as error:
        raise InfrastructureError(
            error.message, hint="check the disk: this run has just written it"
        ) from error


def _or_broken(results: Results, problem: Exception | None) -> Results:
    """Report that the harness or the machine failed, and what to do; what was logged before is
    still judged.
    """
    if problem is None or results.verdict in ("unsafe", "interrupted"):
        return results
    what = " · ".join(str(problem).split("\n"))
    reason = (
        results.reason
        if results.verdict == "broken"
        else f"the harness or the machine failed: {what}"
    )
    hint = getattr(problem, "hint", "")
    reason = reason if not hint or hint in reason else f"{reason}; {hint}"
    return results.model_copy(
        update={"verdict": "broken", "exit_code": EXIT_HARNESS, "reason": reason}
    )


def _or_interrupted(results: Results, stop: StopFlag) -> Results:
    """Report a signal that came between arms, when no arm could record it, and what sends such
    signals here.
    """
    told = end_notice(os.environ) if stop.signum == signal.SIGTERM else ""
    if told and results.verdict == "interrupted":
        return results.model_copy(update={"reason": f"{results.reason}; {told}"})
    if not stop.signum or results.verdict not in ("pass", "fail", "inconclusive"):
        return results
    code = EXIT_TERMINATED if stop.signum == signal.SIGTERM else EXIT_INTERRUPTED
    reason = f"{signal.Signals(stop.signum).name} between arms; {results.reason}"
    return results.model_copy(
        update={"verdict": "interrupted", "exit_code": code, "reason": reason}
    )


def _split(cells: Sequence[Cell]) -> tuple[list[Cell], list[SkippedCell]]:
    """Cells that this machine can run, and the others with the reason."""
    runnable, skipped = [], []
    for cell in cells:
        reason = too_small(cell) or _launcher(cell).missing(cell) or lacking(cell, _launcher(cell))
        if reason:
            skipped.append(SkippedCell(cell=cell.id, reason=reason))
        else:
            runnable.append(cell)
    return runnable, skipped


def _play(
    run: RunDirectory,
    cells: Sequence[Cell],
    data: Mapping[str, DataInfo],
    base_seed: int,
    watcher: Watcher,
    stop: StopFlag,
    sealer: Sealer,
) -> None:
    """Play every arm, one after the other; launchers stay open for the whole run."""
    kinds = plugins.load(plugins.FAULTS, Fault)
    blind, seen = set[str](), set[str]()  # commands that cannot be observed, and that can
    with _sessions(cells, run) as sessions:
        for cell, repeat, arm in _order(cells, base_seed):
            if stop.signum:
                return
            command = _command(cell)
            if command in blind:
                continue  # it could not be observed, and will not be
            name = arm_id(cell.id, repeat, arm)
            ledger = Ledger(run.ledger)
            checkpoints = ledger.will(
                RemoveTree(path=run.checkpoints(name).absolute(), inside=run.root.absolute()),
                arm=name,
            )
            run.make_arm(name)
            kept = False
            # A simulation's logs are the same for a seed: an id that is random would change them.
            token = "" if _launcher(cell).simulates else sealer.token
            setup = ArmSetup(
                id=name,
                cell=cell,
                repeat=repeat,
                arm=arm,
                seed=repeat_seed(base_seed, repeat),
                run=run,
                data=data[cell.id],
                token=token,
            )
            if cell.scenario.workload.command is not None:
                first = command not in seen
                script = ScriptArm(setup, kinds, watcher=watcher, stop=stop, first=first)
                pressure.follow_command(script.scene)
                kept = script.run() not in OVER
                if script.observed:
                    seen.add(command)
                elif first:
                    blind.add(command)
            else:
                session = sessions[cell.scenario.launcher.model_dump_json()]
                try:
                    cluster = session.cluster(setup, lambda: bool(stop.signum))
                except Stopped:
                    return
                strategy = _strategy(cell)
                played = Orchestrator(setup, cluster, strategy, kinds, watcher=watcher, stop=stop)
                pressure.follow_built_in(played.scene, cluster)
                played.run()
            ledger.undone(checkpoints, KEPT if kept else _discard_checkpoints(run, name))
            sealer.arm(name)


def _strategy(cell: Cell) -> Strategy:
    spec = cell.scenario.recovery
    kinds = plugins.load(plugins.STRATEGIES, Strategy)
    return kinds[spec.strategy](**spec.params)


def _command(cell: Cell) -> str:
    """Identifies the command of a cell, and how it is observed; several cells may share one."""
    return cell.scenario.workload.model_dump_json()


def _order(cells: Sequence[Cell], seed: int) -> list[tuple[Cell, int, Any]]:
    """All arms, repeat by repeat; within a repeat shuffled with the seed unless the scenario wants
    them in sequence.

    Interleaving spreads whatever else the machine does over all arms alike.
    """
    arms = []
    rng = random.Random(seed)
    for repeat in range(max(cell.scenario.repeat for cell in cells)):
        block = [
            (cell, repeat, arm)
            for cell in cells
            if repeat < cell.scenario.repeat
            for arm in (
                ("control", "faulted") if cell.scenario.baseline == "paired" else ("faulted",)
            )
        ]
        if cells[0].scenario.order == "interleaved-shuffled":
            rng.shuffle(block)
        arms.extend(block)
    return arms


def _prepare_all(cells: Sequence[Cell], run: RunDirectory) -> dict[str, DataInfo]:
    """Data of every cell's workload, made once each, by cell id."""
    made: dict[str, DataInfo] = {}
    by_cell = {}
    try:
        for cell in cells:
            spec = cell.scenario.workload
            if spec.command is not None:
                by_cell[cell.id] = DataInfo(
                    path=run.root, samples=0, digest="", about="the command's own"
                )
                continue
            key = json.dumps([spec.kind, spec.params], sort_keys=True)
            if key not in made:
                directory = run.root / "data" / str(len(made))
                directory.mkdir(parents=True)
                workload = plugins.load(plugins.WORKLOADS, Workload)[spec.kind](**spec.params)
                made[key] = workload.prepare(directory)
            _refuse_if_fixed(spec, made[key])
            by_cell[cell.id] = made[key]
    except OSError as error:
        raise InfrastructureError(
            f"cannot write to {run.root}: {error.strerror}", hint="free disk space"
        ) from error
    return by_cell


def _refuse_if_fixed(spec: WorkloadSpec, data: DataInfo) -> None:
    for name, value in data.fixed.items():
        if getattr(spec, name) != value:
            raise ScenarioError(
                f"workload.{name} is {getattr(spec, name)}, and {data.about} has {name}={value}",
                hint=(
                    f"make them the same, with workload.{name}: {value}, or leave it out of the"
                    " script's join()"
                ),
            )


@contextmanager
def _sessions(cells: Sequence[Cell], run: RunDirectory) -> Iterator[dict[str, Session]]:
    with ExitStack() as stack:
        played: dict[str, list[Cell]] = {}
        for cell in cells:
            if cell.scenario.workload.command is None:  # a command is started and held by itself
                played.setdefault(cell.scenario.launcher.model_dump_json(), []).append(cell)
        yield {
            key: stack.enter_context(_launcher(its[0]).session(its, run))
            for key, its in played.items()
        }


@contextmanager
def _watching(
    watcher: Watcher | None, live: bool, loaded: LoadedScenario, cells: Sequence[Cell]
) -> Iterator[Watcher]:
    if watcher is not None:
        yield watcher
    elif live:
        with progress(loaded.name, cells) as shown:
            yield shown
    else:
        yield SilentWatcher()


def _launcher(cell: Cell) -> Launcher:
    spec = cell.scenario.launcher
    return plugins.load(plugins.LAUNCHERS, Launcher)[spec.kind](**spec.params)


def _with_launcher(cell: Cell, launcher: str | None) -> Cell:
    if launcher is None:
        return cell
    scenario = cell.scenario.model_copy(
        update={"launcher": cell.scenario.launcher.model_copy(update={"kind": launcher})}
    )
    return cell.model_copy(update={"scenario": scenario})


def _reproduce(argv: Sequence[str], seed: int) -> str:
    words = list(argv)
    if "--seed" not in words:
        words += ["--seed", str(seed)]
    return shlex.join(["chaos", *words])


def _write_facts(run: RunDirectory, resolved: ResolvedRun, busy: str) -> None:
    try:
        write_resolved(run, resolved)
        system = devices.describe() | ({"busy": busy} if busy else {})
        run.system.write_text(json.dumps(system, indent=2) + "\n")
    except OSError as error:
        raise InfrastructureError(
            f"cannot write to {run.root}: {error.strerror}", hint="free disk space"
        ) from error


def _discard_checkpoints(run: RunDirectory, arm: str) -> str:
    """Delete the checkpoints; what they showed is in the log."""
    shutil.rmtree(run.checkpoints(arm), ignore_errors=True)
    return "the arm is over"
