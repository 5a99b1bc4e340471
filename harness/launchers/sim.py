"""Ranks in memory on a simulated clock: no process, no waiting, and one seed gives one log byte for
byte.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from pydantic import Field

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.fault.build import build_all
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import ArmSetup, Launcher
from trainchaos.harness.sim.cluster import SimCluster
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.sim.world.settings import Timings


class Sim(Launcher):
    """A simulation under the real orchestrator, injector, controller and judge, to try out
    scenarios.

    Times are milliseconds of simulated time, by default about those of ``gpt nano`` on two cores;
    ``jitter``: by how much of itself each varies, drawn with the run's seed; ``spread_ms``: between
    the first and the last rank to have the result of one collective; ``wire_kib``: gradients of one
    all-reduce; ``follows_share``: how much of forward and backward follows the samples that a rank
    computes (1: twice as many take twice as long; 0: a step takes as long with any number of
    ranks).
    """

    emulates: ClassVar[str] = "no processes, no training: ranks, times and results are simulated"

    simulates: ClassVar[bool] = True

    offers: ClassVar[frozenset[Need]] = frozenset(Need) - {Need.MACHINES}

    step_ms: float = Field(default=40.0, gt=0, le=600_000)
    jitter: float = Field(default=0.05, ge=0, lt=1)
    spawn_ms: float = Field(default=120.0, ge=0, le=600_000)
    cold_spawn_ms: float = Field(default=2500.0, ge=0, le=600_000)
    teardown_ms: float = Field(default=4.0, ge=0, le=600_000)
    form_ms: float = Field(default=10.0, ge=0, le=600_000)
    transfer_ms: float = Field(default=6.0, ge=0, le=600_000)
    checkpoint_ms: float = Field(default=25.0, ge=0, le=600_000)
    spread_ms: float = Field(default=1.5, ge=0, le=600_000)
    wire_kib: int = Field(default=450, ge=1, le=1 << 30)
    follows_share: float = Field(default=0.0, ge=0, le=1)

    def session(
        self, cells: Sequence[Cell], run: RunDirectory
    ) -> AbstractContextManager[SimSession]:
        """Nothing to open."""
        return contextlib.nullcontext(SimSession(self.timings()))

    def check(self, cell: Cell) -> None:
        """Refuse a fault that does not say that it can be simulated."""
        made = build_all(cell.scenario.faults)
        for fault in cell.scenario.faults:
            if not made[fault.id].simulated:
                raise ScenarioError(
                    f"fault {fault.id!r} ({fault.kind}) is not known to act in a simulation",
                    hint="use launcher local; its author may try it and declare simulated = True",
                )

    def timings(self) -> Timings:
        """As simulated processes want them."""
        return Timings(**self.model_dump(exclude={"wire_kib"}), wire_bytes=self.wire_kib * 1024)


class SimSession:
    """Makes simulated clusters. ``behaviour``: of the ranks; tests put defects into it."""

    def __init__(self, timings: Timings, behaviour: Behaviour | None = None) -> None:
        self._timings = timings
        self._behaviour = behaviour or Behaviour()

    def cluster(self, setup: ArmSetup, stopped: Callable[[], bool] = lambda: False) -> SimCluster:
        """Make ready for one arm."""
        return SimCluster(setup, self._timings, self._behaviour)
