"""One arm in simulation, without the rest of a run: no data, control arm, verdict or reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from trainchaos.chaos import plugins
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launch.workload import DataInfo
from trainchaos.harness.launchers.sim import Sim, SimSession
from trainchaos.harness.run.orchestrator import Orchestrator
from trainchaos.harness.run.progress import SilentWatcher
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.recovery.policy.strategy import Strategy
from trainchaos.recovery.supervise.supervision import StopFlag


def simulated_arm(
    cell: Cell,
    root: Path,
    *,
    seed: int,
    samples: int,
    arm: Literal["control", "faulted"] = "faulted",
    kind: type[Orchestrator] = Orchestrator,
    behaviour: Callable[[], Behaviour] = Behaviour,
    instead: type[Strategy] | None = None,
) -> tuple[Orchestrator, Path]:
    """An arm of a cell whose launcher is the simulator, ready to ``run``, and the directory of its
    events. ``root``: a new directory, which is made; ``samples``: of its data; ``kind``: what runs
    it; ``behaviour``: of its ranks; ``instead``: a strategy in place of the cell's.
    """
    run = RunDirectory(root)
    run.root.mkdir()
    run.make_arm(arm)
    data = DataInfo(path=root, samples=samples, digest="none", about="simulated")
    setup = ArmSetup(id=arm, cell=cell, repeat=0, arm=arm, seed=seed, run=run, data=data)
    timings = Sim(**cell.scenario.launcher.params).timings()
    cluster = SimSession(timings, behaviour()).cluster(setup)
    recovery, faults = cell.scenario.recovery, plugins.load(plugins.FAULTS, Fault)
    strategy = instead or plugins.load(plugins.STRATEGIES, Strategy)[recovery.strategy]
    decides, watcher = strategy(**recovery.params), SilentWatcher()
    made = kind(setup, cluster, decides, faults, watcher=watcher, stop=StopFlag())
    return made, run.events(arm)
