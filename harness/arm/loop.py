"""Plays one arm from its first event to its last: begin, turn until the job is over, end.

The same loop for a built-in workload, real or simulated (``harness.run.orchestrator``), and for a
command of the user (``harness.script.arm``). Only the job differs.
"""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from trainchaos.chaos.events.log import LOG_VERSION, ORCHESTRATOR, Event, EventWriter, Kind
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.planning.load import ARM_LEAST_S, OWN, WORTH_SAYING, OthersLoad
from trainchaos.chaos.scenario.sla import parse_stop
from trainchaos.chaos.schedule.plan import PlannedFault, plan_scenario
from trainchaos.chaos.schedule.stops import FailureTally, JobSnapshot, to_stop
from trainchaos.harness.arm.job import ArmJob
from trainchaos.harness.arm.timers import Timers
from trainchaos.harness.arm.watching import Watcher
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.recovery.supervise.supervision import StopFlag


class Injected(Protocol):
    """The injector, as the loop uses it (``harness.inject.injector.Injector``)."""

    def announce(self) -> None:
        """Record the planned faults."""

    def observe(self, event: Event) -> None:
        """Take note of an event of the arm."""

    def close(self) -> None:
        """Heal everything."""


class ArmLoop:
    """One arm. ``timers``: on the clock ``now_ns``; ``stop``: set by a signal, which ends the job
    in order.
    """

    def __init__(
        self,
        setup: ArmSetup,
        job: ArmJob,
        faults: Injected,
        timers: Timers,
        *,
        watcher: Watcher,
        stop: StopFlag,
        now_ns: Callable[[], int],
    ) -> None:
        self._setup = setup
        self._job = job
        self._faults = faults
        self._timers = timers
        self._watcher = watcher
        self._stop = stop
        self._now_ns = now_ns
        self._writer = EventWriter(setup.run.events(setup.id), ORCHESTRATOR, now_ns)
        self._conditions = [parse_stop(c.when) for c in setup.cell.scenario.stop_conditions]
        self._tally = FailureTally()
        self._started_ns = 0
        here = setup.cell.scenario.launcher.kind in OWN
        self._load = OthersLoad() if here else None

    def run(self) -> str:
        """Play the arm and return the outcome. Every fault is healed and every process gone
        afterwards, also after an error, which is raised again.
        """
        job = self._job
        self._begin()
        try:
            job.prepare()
            self._faults.announce()
            job.start()
            while not job.over:
                self._turn()
        except BaseException as error:
            outcome = "interrupted" if isinstance(error, KeyboardInterrupt) else "broken"
            job.fail(outcome, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._end()
        return job.outcome

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event and pass it to the watcher and the injector."""
        event = self._write(kind, step=step, generation=generation, **data)
        self._faults.observe(event)
        self._tally.observe(event)
        return event

    def _begin(self) -> None:
        setup, scenario = self._setup, self._setup.cell.scenario
        spec = scenario.workload
        self._started_ns = self._now_ns()
        about = self._job.introduce()
        run: dict[str, Any] = {"run": setup.token} if setup.token else {}
        self._write(Kind.ACTOR_STARTED, **about.process, **run)
        self._write(
            Kind.RUN_STARTED,
            log_version=LOG_VERSION,
            arm=setup.arm,
            cell=setup.cell.id,
            repeat=setup.repeat,
            seed=setup.seed,
            ranks=spec.ranks,
            spares=about.spares,
            steps=spec.steps,
            global_batch=spec.global_batch,
            strategy=scenario.recovery.strategy,
            **about.facts,
        )

    def _turn(self) -> None:
        self._job.turn()
        self._timers.run_due()
        self._job.settle()
        self._check_bounds()
        self._watcher.on_progress(self._setup, self._job.committed, self._now_ns())

    def _check_bounds(self) -> None:
        job = self._job
        if self._stop.signum:
            job.stop("interrupted", signals.Signals(self._stop.signum).name)
        if not job.ending and self._conditions and (met := self._condition_met()):
            job.stop("halted", met)
        if not job.ending and (late := job.out_of_patience()):
            job.stop(*late)

    def _condition_met(self) -> str | None:
        now, vitals = self._now_ns(), self._job.vitals()
        facts = JobSnapshot(
            idle_s=(now - vitals.progress_ns) / 1e9,
            wall_s=(now - self._started_ns) / 1e9,
            healthy=vitals.healthy,
            failures=self._tally.failures,
            nonfinite=self._tally.nonfinite or vitals.nonfinite,
        )
        return to_stop(self._conditions, facts)

    def _end(self) -> None:
        """Kill, reap, heal, account. The job releases the machine even when one of these fails, as
        on a disk that takes no more events.
        """
        job = self._job
        try:
            job.end_processes()
            self._faults.close()
        finally:
            job.release()
        last = job.account()
        self._say_if_busy()
        self._write(Kind.LEFTOVERS, **last.leftovers)
        outcome = job.outcome or "broken"
        self._write(Kind.RUN_FINISHED, outcome=outcome, reason=job.reason, **last.finished)
        self._writer.close()

    def _say_if_busy(self) -> None:
        """Record what other programs used of this machine meanwhile, if it was much."""
        cpus = os.cpu_count() or 1
        share = self._load.share(cpus, least_s=ARM_LEAST_S) if self._load else None
        if share is not None and share >= WORTH_SAYING:
            self._write(Kind.MACHINE_BUSY, others=round(share * cpus, 2), cpus=cpus)

    def _write(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        self._writer.generation = self._job.generation
        event = self._writer.write(kind, step=step, generation=generation, **data)
        self._watcher.on_event(self._setup, event)
        return event


def plan_of(
    setup: ArmSetup, kinds: Mapping[str, type[Fault]], *, spares: int
) -> tuple[PlannedFault, ...]:
    """The faults of an arm, targets resolved; none in a control arm."""
    if setup.arm != "faulted":
        return ()
    return plan_scenario(setup.cell.scenario, kinds, seed=setup.seed, spares=spares)
