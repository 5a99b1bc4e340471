"""What an arm adds to the loop around its job (``recovery.supervise.loop``): faults, timers,
conditions that end it, and who watches it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainchaos.chaos.events.log import LOG_VERSION, Event, Kind
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.planning.load import ARM_LEAST_S, OWN, WORTH_SAYING, OthersLoad
from trainchaos.chaos.scenario.sla import parse_stop
from trainchaos.chaos.schedule.plan import PlannedFault, plan_scenario
from trainchaos.chaos.schedule.stops import FailureTally, JobSnapshot, to_stop
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.recovery.process.host import RecordEvent
from trainchaos.recovery.supervise.loop import Observer


class Timers:
    """``now_ns``: the clock of the arm."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.now_ns = now_ns
        self._pending: list[tuple[int, Callable[[], None]]] = []  # in the order they were set

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run ``action`` in ``delay_s`` seconds, if the arm still runs then."""
        self._pending.append((self.now_ns() + int(delay_s * 1e9), action))

    def run_due(self) -> None:
        """Run the actions that are due. An action set by another waits for the next call."""
        now = self.now_ns()
        due = [action for due_ns, action in self._pending if due_ns <= now]
        self._pending = [item for item in self._pending if item[0] > now]
        for action in due:
            action()


class Watcher(Protocol):
    """Shows an arm to a person."""

    def on_event(self, setup: ArmSetup, event: Event) -> None:
        """The arm wrote an event."""

    def on_waiting(self, setup: ArmSetup, known: str) -> None:
        """What is ``known`` of a command of which no step was seen yet, for people; empty once one
        was.
        """

    def on_progress(self, setup: ArmSetup, committed: int, now_ns: int) -> None:
        """The job has committed this many steps."""


@dataclass(frozen=True, kw_only=True)
class Vitals:
    """What stop conditions are judged by. ``progress_ns``: when a step was last committed, or could
    first have been; ``healthy``: replicas whose ranks are all held by live processes, None until
    training has begun; ``nonfinite``: a loss that is NaN or infinite was reported.
    """

    progress_ns: int
    healthy: int | None
    nonfinite: bool = False


class ArmJob(Protocol):
    """A job that an arm plays, as its observer sees it."""

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event."""

    @property
    def committed(self) -> int:
        """Steps committed so far."""

    @property
    def ending(self) -> bool:
        """Whether the end is decided, so that stop conditions no longer matter."""

    def settle(self) -> None:
        """Process what arrived while faults and timers acted, and notice the end of the job."""

    def vitals(self) -> Vitals:
        """The job's state, for the stop conditions of the scenario."""

    def out_of_patience(self) -> tuple[str, str] | None:
        """Outcome and reason when one of the job's own deadlines has passed, else None."""

    def stop(self, outcome: str, reason: str) -> None:
        """End the job in order; does nothing when it is ending already."""


class Injected(Protocol):
    """The injector (``harness.inject.injector.Injector``)."""

    def announce(self) -> None:
        """Record the planned faults."""

    def observe(self, event: Event) -> None:
        """Take note of an event of the arm."""

    def close(self) -> None:
        """Heal everything."""


class ArmObserver(Observer):
    """Of one arm; ``timers``: on its clock."""

    def __init__(
        self, setup: ArmSetup, job: ArmJob, faults: Injected, timers: Timers, watcher: Watcher
    ) -> None:
        self._setup, self._job, self._faults = setup, job, faults
        self._timers, self._watcher = timers, watcher
        self._conditions = [parse_stop(c.when) for c in setup.cell.scenario.stop_conditions]
        self._tally = FailureTally()
        self._started_ns = timers.now_ns()
        here = setup.cell.scenario.launcher.kind in OWN
        self._load = OthersLoad() if here else None

    def on_event(self, event: Event) -> None:
        self._watcher.on_event(self._setup, event)
        self._faults.observe(event)
        self._tally.observe(event)

    def before_start(self) -> None:
        self._faults.announce()

    def after_turn(self) -> None:
        job = self._job
        self._timers.run_due()
        job.settle()
        if not job.ending and self._conditions and (met := self._condition_met()):
            job.stop("halted", met)
        if not job.ending and (late := job.out_of_patience()):
            job.stop(*late)
        self._watcher.on_progress(self._setup, job.committed, self._timers.now_ns())

    def after_end(self) -> None:
        """Heal everything, and record what other programs used of this machine, if it was much."""
        self._faults.close()
        cpus = os.cpu_count() or 1
        share = self._load.share(cpus, least_s=ARM_LEAST_S) if self._load else None
        if share is not None and share >= WORTH_SAYING:
            self._job.record(Kind.MACHINE_BUSY, others=round(share * cpus, 2), cpus=cpus)

    def _condition_met(self) -> str | None:
        now, vitals = self._timers.now_ns(), self._job.vitals()
        facts = JobSnapshot(
            idle_s=(now - vitals.progress_ns) / 1e9,
            wall_s=(now - self._started_ns) / 1e9,
            healthy=vitals.healthy,
            failures=self._tally.failures,
            nonfinite=self._tally.nonfinite or vitals.nonfinite,
        )
        return to_stop(self._conditions, facts)


def introduce(
    setup: ArmSetup, record: RecordEvent, process: Mapping[str, Any], spares: int, **facts: Any
) -> None:
    """Write the first events of an arm. ``process``: data of ``actor_started``; ``spares``: that
    the job starts with; ``facts``: data of ``run_started`` that depend on the kind of job.
    """
    scenario = setup.cell.scenario
    run: dict[str, Any] = {"run": setup.token} if setup.token else {}
    record(Kind.ACTOR_STARTED, **process, **run)
    record(
        Kind.RUN_STARTED,
        log_version=LOG_VERSION,
        arm=setup.arm,
        cell=setup.cell.id,
        repeat=setup.repeat,
        seed=setup.seed,
        ranks=scenario.workload.ranks,
        spares=spares,
        steps=scenario.workload.steps,
        global_batch=scenario.workload.global_batch,
        strategy=scenario.recovery.strategy,
        **facts,
    )


def plan_of(
    setup: ArmSetup, kinds: Mapping[str, type[Fault]], *, spares: int
) -> tuple[PlannedFault, ...]:
    """The faults of an arm, targets resolved; none in a control arm."""
    if setup.arm != "faulted":
        return ()
    return plan_scenario(setup.cell.scenario, kinds, seed=setup.seed, spares=spares)
