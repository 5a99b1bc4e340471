"""Runs a whole scenario: every cell, repeat and arm, then judgement and reports."""

from __future__ import annotations

import json
import random
import shlex
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chaos import plugins
from chaos.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, InfrastructureError, ScenarioError
from chaos.fault import Fault
from chaos.load import LoadedScenario
from chaos.scenario import Cell, ResolvedRun, SkippedCell
from chaos.schedule import repeat_seed
from harness import devices, judge
from harness.launcher import ArmSetup, Launcher, Session
from harness.needs import lacking, refuse_impossible
from harness.orchestrator import Orchestrator, StopFlag, Watcher
from harness.results import Results
from harness.rundir import RunDirectory, arm_id, create_run, point_latest, write_resolved
from harness.workload import DataInfo, Workload
from recovery.strategy import Strategy


def run_scenario(
    loaded: LoadedScenario, *, runs: Path, seed: int | None, live: bool, argv: Sequence[str],
    launcher: str | None = None, only: Sequence[str] = (), watcher: Watcher | None = None,
) -> Results:  # fmt: skip
    """Run it and return the judged results, which are in the run directory too; reports are the caller's to
    render.

    ``seed``: instead of the scenario's; ``live``: show progress; ``only``: cell ids to run (empty: all);
    ``argv``: the command line, kept for reproduction. SIGINT and SIGTERM end the run after healing, with what
    was measured so far judged. Raises InfrastructureError when the machine refuses, ScenarioError when the
    data does.
    """
    cells = [_with_launcher(cell, launcher) for cell in loaded.cells if not only or cell.id in only]
    base_seed = cells[0].scenario.seed if seed is None else seed
    for cell in cells:
        _launcher(cell).check(cell)
        refuse_impossible(cell, _launcher(cell))
    runnable, skipped = _split(cells)
    now = datetime.now(UTC)
    run = create_run(runs, loaded.name, base_seed, now)
    resolved = ResolvedRun(
        run_id=run.root.name, source=str(loaded.path), started=now.isoformat(timespec="seconds"),
        reproduce=_reproduce(argv, base_seed), seed=base_seed, cells=runnable, skipped=skipped,
        sla_lines=loaded.sla_lines,
    )  # fmt: skip
    stop = StopFlag()
    with _signals(stop):
        data = _prepare_all(runnable, run)
        _write_facts(run, resolved)
        point_latest(run)
        if runnable:
            with _watching(watcher, live, loaded, runnable) as shown:
                _play(run, runnable, data, base_seed, shown, stop)
    results = _or_interrupted(judge.judge(run), stop)
    judge.write_results(run, results)
    return results


def _or_interrupted(results: Results, stop: StopFlag) -> Results:
    """Say so when a signal came while no arm was there to write it down."""
    if not stop.signum or results.verdict not in ("pass", "fail", "inconclusive"):
        return results
    code = EXIT_TERMINATED if stop.signum == signal.SIGTERM else EXIT_INTERRUPTED
    reason = f"{signal.Signals(stop.signum).name} between arms; {results.reason}"
    return results.model_copy(update={"verdict": "interrupted", "exit_code": code, "reason": reason})


def _split(cells: Sequence[Cell]) -> tuple[list[Cell], list[SkippedCell]]:
    """Cells this machine can run, and those it cannot with the reason."""
    runnable, skipped = [], []
    for cell in cells:
        reason = _launcher(cell).missing(cell) or lacking(cell, _launcher(cell))
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
) -> None:
    """Every arm, one after the other; launchers stay open for the whole run."""
    kinds = plugins.load("chaos.faults", Fault)
    with _sessions(cells) as sessions:
        for cell, repeat, arm in _order(cells, base_seed):
            if stop.signum:
                return
            name = arm_id(cell.id, repeat, arm)
            run.make_arm(name)
            setup = ArmSetup(
                id=name,
                cell=cell,
                repeat=repeat,
                arm=arm,
                seed=repeat_seed(base_seed, repeat),
                run=run,
                data=data[cell.id],
            )
            spec = cell.scenario.recovery
            strategy = plugins.load("recovery.strategies", Strategy)[spec.strategy](**spec.params)
            cluster = sessions[cell.scenario.launcher.model_dump_json()].cluster(setup)
            Orchestrator(setup, cluster, strategy, kinds, watcher=watcher, stop=stop).run()
            _discard_checkpoints(run, name)


def _order(cells: Sequence[Cell], seed: int) -> list[tuple[Cell, int, Any]]:
    """All arms, repeat by repeat; within a repeat shuffled with the seed unless the scenario wants them in
    sequence.

    Interleaving spreads whatever else the machine does over all arms alike.
    """
    arms = []
    rng = random.Random(seed)
    for repeat in range(max(cell.scenario.repeat for cell in cells)):
        block = [
            (cell, repeat, arm)
            for cell in cells
            if repeat < cell.scenario.repeat
            for arm in (("control", "faulted") if cell.scenario.baseline == "paired" else ("faulted",))
        ]
        if cells[0].scenario.order == "interleaved-shuffled":
            rng.shuffle(block)
        arms.extend(block)
    return arms


def _prepare_all(cells: Sequence[Cell], run: RunDirectory) -> dict[str, DataInfo]:
    """Data of every cell's workload, made once each, by cell id. An error leaves no run directory behind."""
    made: dict[str, DataInfo] = {}
    by_cell = {}
    try:
        for cell in cells:
            spec = cell.scenario.workload
            key = json.dumps([spec.kind, spec.params], sort_keys=True)
            if key not in made:
                directory = run.root / "data" / str(len(made))
                directory.mkdir(parents=True)
                workload = plugins.load("harness.workloads", Workload)[spec.kind](**spec.params)
                made[key] = workload.prepare(directory)
            by_cell[cell.id] = made[key]
    except OSError as error:
        raise InfrastructureError(
            f"cannot write to {run.root}: {error.strerror}", hint="free disk space"
        ) from error
    except ScenarioError:
        shutil.rmtree(run.root, ignore_errors=True)
        raise
    return by_cell


@contextmanager
def _sessions(cells: Sequence[Cell]) -> Iterator[dict[str, Session]]:
    with ExitStack() as stack:
        opened: dict[str, Session] = {}
        for cell in cells:
            key = cell.scenario.launcher.model_dump_json()
            if key not in opened:
                opened[key] = stack.enter_context(_launcher(cell).session())
        yield opened


@contextmanager
def _signals(stop: StopFlag) -> Iterator[None]:
    """SIGINT and SIGTERM set the flag, so that the arm ends by healing; only the main thread may install handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(signum: int, _: object) -> None:
        stop.signum = signum

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def _watching(
    watcher: Watcher | None, live: bool, loaded: LoadedScenario, cells: Sequence[Cell]
) -> Iterator[Watcher]:
    from harness.progress import Quiet, progress

    if watcher is not None:
        yield watcher
    elif live:
        with progress(loaded.name, cells) as shown:
            yield shown
    else:
        yield Quiet()


def _launcher(cell: Cell) -> Launcher:
    spec = cell.scenario.launcher
    return plugins.load("harness.launchers", Launcher)[spec.kind](**spec.params)


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


def _write_facts(run: RunDirectory, resolved: ResolvedRun) -> None:
    try:
        write_resolved(run, resolved)
        run.system.write_text(json.dumps(devices.describe(), indent=2) + "\n")
    except OSError as error:
        raise InfrastructureError(
            f"cannot write to {run.root}: {error.strerror}", hint="free disk space"
        ) from error


def _discard_checkpoints(run: RunDirectory, arm: str) -> None:
    """Checkpoints were means to an end; what they showed is in the log."""
    shutil.rmtree(run.checkpoints(arm), ignore_errors=True)
