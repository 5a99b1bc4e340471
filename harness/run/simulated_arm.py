"""One arm in simulation, without the rest of a run: no data, control arm, verdict or reports."""

from __future__ import annotations

from pathlib import Path

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

FAULTED = "faulted"


def simulated_arm(cell: Cell, root: Path, *, seed: int, samples: int) -> tuple[Orchestrator, Path]:
    """The faulted arm of a cell whose launcher is the simulator, ready to ``run``, and the
    directory of its events. ``root``: a new directory, which is made; ``samples``: of its data.
    """
    run = RunDirectory(root)
    run.root.mkdir()
    run.make_arm(FAULTED)
    setup = ArmSetup(
        id=FAULTED,
        cell=cell,
        repeat=0,
        arm="faulted",
        seed=seed,
        run=run,
        data=DataInfo(path=run.root, samples=samples, digest="none", about="simulated"),
    )
    recovery = cell.scenario.recovery
    strategy = plugins.load(plugins.STRATEGIES, Strategy)[recovery.strategy](**recovery.params)
    arm = Orchestrator(
        setup,
        SimSession(Sim(**cell.scenario.launcher.params).timings(), Behaviour()).cluster(setup),
        strategy,
        plugins.load(plugins.FAULTS, Fault),
        watcher=SilentWatcher(),
        stop=StopFlag(),
    )
    return arm, run.events(FAULTED)
