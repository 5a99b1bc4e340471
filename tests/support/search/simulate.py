"""Plays whole arms on the simulated launcher, in memory but for their logs, and judges them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from tests.mutations.tape import Tape
from tests.support.arms import EXACT
from trainchaos.chaos import plugins
from trainchaos.chaos.events.log import Event, Log, read_actor, read_log
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.scenario.model import Cell, Scenario
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.checkers import Evidence
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launch.workload import DataInfo
from trainchaos.harness.launchers.sim import Sim, SimSession
from trainchaos.harness.run.orchestrator import Orchestrator
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.sim.world.settings import RankConfig
from trainchaos.recovery.policy.strategy import Strategy
from trainchaos.recovery.supervise.supervision import StopFlag

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Where simulated ranks flush real checkpoints to in no time; None: only to the disk."""
RANKS, STEPS, BATCH, EVERY, SAMPLES = 4, 60, 24, 10, 700
KILL = {
    "id": "kill",
    "kind": "process-kill",
    "target": {"rank": 2},
    "at": {"step": 33, "phase": "backward"},
}


class Silent:
    """Watches and says nothing."""

    def on_event(self, setup: ArmSetup, event: Event) -> None:
        """Nothing."""

    def on_progress(self, setup: ArmSetup, committed: int, now_ns: int) -> None:
        """Nothing."""


def cell_of(recovery: Any, faults: list[dict[str, Any]], **more: Any) -> Cell:
    """One cell. ``more``: other keys of the scenario; ``ranks``, ``steps`` and the like
    go to the workload.
    """
    workload = {
        "kind": "mlp",
        "ranks": more.pop("ranks", RANKS),
        "steps": more.pop("steps", STEPS),
        "global_batch": more.pop("global_batch", BATCH),
        "parallelism": more.pop("parallelism", "ddp"),
        "checkpoint": {
            "every": more.pop("every", EVERY),
            "keep": more.pop("keep", 3),
            "memory": more.pop("memory", False),
            "sharded": more.pop("sharded", False),
        },
        "determinism": more.pop("determinism", "default"),
        "evaluate": more.pop("evaluate", None),
        "verify_every": more.pop("verify_every", None),
    }
    body = {
        "version": 1,
        "name": "sim",
        "launcher": "sim",
        "workload": workload,
        "recovery": recovery,
        "faults": faults,
    }
    stop = [{"when": "no_committed_step_for > 100s"}]
    scenario = Scenario.model_validate({**body, "stop_conditions": stop, **more})
    return Cell(id="default", params={}, scenario=scenario)


@dataclass(frozen=True, kw_only=True)
class Played:
    """One arm that was played. ``outcome``: as the orchestrator returned it."""

    outcome: str
    cell: Cell
    log: Log
    directory: Path


def play(
    cell: Cell,
    root: Path,
    *,
    seed: int,
    arm: Literal["faulted", "control"] = "faulted",
    behaviour: Behaviour | None = None,
    strategy: Strategy | None = None,
    sim: Sim | None = None,
) -> Played:
    """Play one arm; ``strategy`` instead of the scenario's own."""
    run = RunDirectory(root)
    run.make_arm(arm)
    data = DataInfo(path=root, samples=SAMPLES, digest="none", about="simulated")
    setup = ArmSetup(id=arm, cell=cell, repeat=0, arm=arm, seed=seed, run=run, data=data)
    spec = cell.scenario.recovery
    strategy = strategy or plugins.load(plugins.STRATEGIES, Strategy)[spec.strategy](**spec.params)
    cluster = SimSession((sim or Sim()).timings(), behaviour).cluster(setup)
    kinds = plugins.load(plugins.FAULTS, Fault)
    outcome = Orchestrator(setup, cluster, strategy, kinds, watcher=Silent(), stop=StopFlag()).run()
    return Played(
        outcome=outcome, cell=cell, log=read_log(run.events(arm)), directory=run.events(arm)
    )


def control_of(cell: Cell, *, seed: int, sim: Sim | None = None) -> Played:
    """A control arm, which no fault of the scenario changes: of cells that differ by their faults
    alone it is played once. Its directory is gone.
    """
    bare = cell.scenario.model_copy(update={"faults": []}).model_dump_json()
    return _control(bare, seed, (sim or Sim()).model_dump_json())


@lru_cache(maxsize=12)  # of their logs the collector walks all objects again and again
def _control(scenario: str, seed: int, sim: str) -> Played:
    cell = Cell(id="default", params={}, scenario=Scenario.model_validate_json(scenario))
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as root:
        return play(cell, Path(root), seed=seed, arm="control", sim=Sim.model_validate_json(sim))


def evidence(faulted: Played, control: Played | None) -> Evidence:
    """The evidence on a faulted arm, or with no control arm given, on one that is a control arm
    itself.
    """
    return Evidence(
        arm="faulted" if control else "control",
        cell=faulted.cell,
        log=faulted.log,
        control=control.log if control else None,
        controls=(control.log,) if control else (),
        exact=EXACT,
    )


def changed(faulted: Played, control: Played | None, change: Callable[[Tape], object]) -> Evidence:
    """The evidence on a faulted arm after a change of its log."""
    paths = sorted(faulted.directory.glob("*.jsonl"))
    change(tape := Tape.of({path.stem: read_actor(path).events for path in paths}))
    return replace(evidence(faulted, control), arm="faulted", log=tape.log())


def rank_config(directory: Path, *, world: int, steps: int) -> RankConfig:
    """Of simulated ranks without a job around them, which hold one copy of the model together;
    makes their directories.
    """
    for name in ("events", "checkpoints"):
        (directory / name).mkdir(parents=True)
    return RankConfig(
        process="",
        events=directory / "events",
        world=world,
        shards=world,
        steps=steps,
        global_batch=4,
        samples=64,
        seed=5,
        checkpoint_dir=directory / "checkpoints",
        checkpoint_every=3,
        checkpoint_keep=2,
        timings=Sim().timings(),
    )
