"""Plays one arm: starts the job, supervises it, injects the planned faults, and writes down what
happens.

One loop, the same for real processes and simulated ones: wait for something to happen, tell the
controller, let the injector act, check the bounds.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Callable, Mapping
from typing import Any

from chaos.events.log import ORCHESTRATOR, Event, EventWriter, Kind
from chaos.fault.base import Fault
from chaos.fault.targets import StorageTarget
from chaos.scenario.sla import parse_stop
from chaos.schedule import plan as schedule
from chaos.schedule.stops import Facts, Tally, to_stop
from harness.arm.in_force import InForce
from harness.arm.keeper_tracker import Keeping
from harness.arm.roster import Roster
from harness.arm.watching import StopFlag, Watcher
from harness.inject.injector import Injector
from harness.launch.health import HealthSource
from harness.launch.launcher import (
    ArmSetup,
    Cluster,
    Exited,
    GroupControl,
    LinkControl,
    MachineControl,
    Report,
    Said,
    StoreControl,
)
from harness.run.coordinator import Coordinator
from harness.run.timeouts import timing_of
from harness.undo.ledger import Ledger
from recovery.policy.strategy import Strategy
from recovery.process.local import Dying
from recovery.supervise.controller import Controller, Stage, Timing
from recovery.supervise.supervision import Hands
from recovery.transport.progress_counters import Mark
from recovery.transport.wire import CheckpointNote, Extra, Join, Message, Stop

TICK_S = 0.02
DRAIN_LIMIT_S = 10.0
_TRIGGER_KINDS = {Kind.FAILURE_DETECTED: "recovery_started", Kind.GENERATION_STARTED: "regroup"}


class Orchestrator:
    """One arm. Implements ``recovery.supervise.controller.Hands`` and
    ``harness.inject.injector.Scene``.
    """

    def __init__(
        self,
        setup: ArmSetup,
        cluster: Cluster,
        strategy: Strategy,
        kinds: Mapping[str, type[Fault]],
        *,
        watcher: Watcher,
        stop: StopFlag,
        timing: Timing | None = None,
    ) -> None:
        self.setup = setup
        self.cluster = cluster
        self.now_ns, self.pulse = cluster.now_ns, cluster.pulse
        self._watcher = watcher
        self._stop = stop
        self._writer = EventWriter(setup.run.events(setup.id), ORCHESTRATOR, cluster.now_ns)
        self.ledger, self.in_force = Ledger(setup.run.ledger), InForce()
        self.health = HealthSource(setup.run.root / "health" / f"{setup.id}.jsonl")
        self._roster = Roster(self, cluster, spares=strategy.spares_wanted)
        self._keeping = Keeping(self, cluster)
        self._timing = timing or timing_of(setup.cell.scenario)
        self.strategy = strategy
        log = setup.run.events(setup.id) / f"{ORCHESTRATOR}.jsonl"
        self._coordinator = Coordinator(self._new_controller, self, log, self.before_act)
        plan: tuple[schedule.PlannedFault, ...] = ()
        if setup.arm == "faulted":
            plan = schedule.plan_scenario(
                setup.cell.scenario, kinds, seed=setup.seed, spares=strategy.spares_wanted
            )
        self.injector = Injector(self, plan, kinds)
        self._rules = [parse_stop(c.when) for c in setup.cell.scenario.stop_conditions]
        self._tally = Tally()
        self._trained = False
        self._topology = setup.cell.scenario.topology
        self._last_commit = (0, 0)
        self._later: list[tuple[int, Callable[[], None]]] = []

    def _new_controller(self, hands: Hands) -> Controller:
        spec = self.setup.cell.scenario.workload
        return Controller(
            self.strategy,
            hands,
            world=spec.ranks,
            shards=spec.shards,
            steps=spec.steps,
            store_port=self.cluster.store_port,
            timing=self._timing,
        )

    def before_act(self, act: str) -> None:
        """Called before each act of the coordinator; tests override it."""

    def run(self) -> str:
        """Play the arm to its end and return the outcome; everything is healed and gone afterwards,
        however it ends.
        """
        self._begin()
        try:
            self.injector.announce()
            self._coordinator.start()
            self._last_commit = (0, self.now_ns())
            while not self.controller.done:
                self._turn(self.controller.look_in_s)
        except BaseException as error:
            if not self.controller.outcome:
                interrupted = isinstance(error, KeyboardInterrupt)
                self.controller.outcome = "interrupted" if interrupted else "broken"
                self.controller.reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._end()
        return self.controller.outcome

    # ---- the loop

    def _turn(self, timeout_s: float) -> None:
        reports = self.cluster.wait(timeout_s)
        self._note_nodes()
        for report in reports:
            self._hear(report)
        if self._coordinator.due(at_once=bool(self._stop.signum)):
            self._take_over()
        self._keeping.look()
        self._coordinator.supervise(lambda c: c.store_is_at(self.cluster.store_port))
        self._coordinator.supervise(lambda c: c.tick())
        self.injector.tick(self.controller.committed)
        self._do_what_is_due()
        self._read_health()
        self._check_bounds()
        committed = self.controller.committed
        if committed > self._last_commit[0]:
            self._last_commit = (committed, self.now_ns())
        self._watcher.on_progress(self.setup, committed, self.now_ns())

    def _hear(self, report: Report) -> None:
        if isinstance(report, Exited):
            self._note_exit(report)
        if self._coordinator.misses(report):
            return
        if isinstance(report, Said):
            self._on_said(report)
        elif isinstance(report, Dying):
            self._coordinator.supervise(lambda c: c.on_dying(report.process))
        else:
            self._coordinator.supervise(lambda c: c.on_exit(report.process, report.how))

    def _take_over(self) -> None:
        self.cluster.back()
        for report in self._coordinator.take_over(self._roster.asked_ns):
            self._hear(report)

    @property
    def controller(self) -> Controller:
        """Of the coordinator that supervises, or did last."""
        return self._coordinator.controller

    @property
    def has_coordinator(self) -> bool:
        """Whether somebody supervises the job now."""
        return self._coordinator.there

    def lose_coordinator(self, down_s: float) -> None:
        """See harness.arm.fault_context.Scene."""
        self._coordinator.lose(down_s)
        self.cluster.away()

    def _on_said(self, report: Said) -> None:
        message = report.message
        if isinstance(message, Extra):
            self.injector.on_said(report.process, self._rank_of(report.process), message)
            return
        self._coordinator.supervise(lambda c: c.on_message(report.process, message))
        if isinstance(message, CheckpointNote) and message.state in ("saving", "committed"):
            self.injector.on_event(f"checkpoint_{message.state}")

    def _note_exit(self, report: Exited) -> None:
        pid = self._roster.note_exit(report)
        self.record(
            Kind.PROCESS_EXITED,
            process=report.process,
            pid=pid,
            exit_code=report.exit_code,
            signal=report.signal,
            expected=self.controller.exit_was_expected(report.process),
            last_seq=self.cluster.mark(report.process).last_seq,
            asked_ns=self._roster.asked_ns.get(report.process),
        )

    def _note_nodes(self) -> None:
        """First of all, since what happens on a node is judged by what is known of it."""
        for news in self.cluster.news():
            self.record(news.kind, **news.data)

    def _read_health(self) -> None:
        for reading in (*self.cluster.hardware(), *self.health.read()):
            self.record(Kind.HEALTH_REPORTED, **reading.model_dump())

    def _do_what_is_due(self) -> None:
        now = self.now_ns()
        due = [action for due_ns, action in self._later if due_ns <= now]
        self._later = [item for item in self._later if item[0] > now]
        for action in due:
            action()

    def _check_bounds(self) -> None:
        if self._stop.signum:
            name = signals.Signals(self._stop.signum).name
            self._coordinator.supervise(lambda c: c.stop("interrupted", name))
        now = self.now_ns()
        if self._rules and self.controller.stage is not Stage.ENDING:
            place = self._topology
            held = [rank for rank in range(place.ranks) if self.process_of(rank)]
            facts = Facts(
                idle_s=(now - self._last_commit[1]) / 1e9,
                wall_s=(now - self._started_ns) / 1e9,
                healthy=place.whole(held) if self._trained else None,
                failures=self._tally.failures,
                nonfinite=self._tally.nonfinite,
            )
            if reason := to_stop(self._rules, facts):
                self._coordinator.supervise(lambda c: c.stop("halted", reason))

    def _begin(self) -> None:
        scenario = self.setup.cell.scenario
        spec = scenario.workload
        self._started_ns = self.now_ns()
        self._write(Kind.ACTOR_STARTED, **self.cluster.identity())
        self._write(
            Kind.RUN_STARTED,
            arm=self.setup.arm,
            cell=self.setup.cell.id,
            repeat=self.setup.repeat,
            seed=self.setup.seed,
            ranks=spec.ranks,
            spares=self.strategy.spares_wanted,
            steps=spec.steps,
            global_batch=spec.global_batch,
            strategy=scenario.recovery.strategy,
            order={"seed": self.setup.seed, "samples": self.setup.data.samples},
            checkpoint_every=spec.checkpoint.every,
            data=self.setup.data.about,
            data_digest=self.setup.data.digest,
            launcher=scenario.launcher.kind,
            evaluate=spec.evaluate.due if spec.evaluate else {},
        )
        self._note_nodes()

    def _end(self) -> None:
        """Heal, kill, reap, account; the last events are written whatever happened before."""
        try:
            self._stop_everything()
            self.injector.close()
        finally:
            committed = self.controller.committed  # read from the marks, which end with the cluster
            leftovers = self.cluster.close()  # even when the disk no longer takes events
            self._roster.ended(leftovers)
        self._write(
            Kind.LEFTOVERS,
            processes=leftovers.processes,
            ports=leftovers.ports,
            shared_memory=leftovers.shared_memory,
        )
        outcome = self.controller.outcome or "broken"
        self._write(
            Kind.RUN_FINISHED,
            outcome=outcome,
            reason=self.controller.reason,
            committed_step=committed,
        )
        self._writer.close()

    def _stop_everything(self) -> None:
        """Wait until every process is reaped and its exit recorded, killing what does not end by
        itself.
        """
        for name in self._roster.there() if not self.controller.done else ():
            self.kill(name)
        # A job that broke is nobody's to supervise any more: whoever did would answer each end with
        # a new process.
        hear = self._hear if self.controller.done else self._note_exit
        deadline = self.now_ns() + int(DRAIN_LIMIT_S * 1e9)
        while self._roster.there() and self.now_ns() < deadline:
            for report in self.cluster.wait(TICK_S):
                if isinstance(report, Exited):
                    hear(report)
        self._keeping.end()

    # ---- Hands and Scene

    @property
    def storage(self) -> StorageTarget | None:
        """Of the checkpoints."""
        return self.cluster.storage

    @property
    def groups(self) -> GroupControl | None:
        """Limits on memory."""
        return self.cluster.groups

    def now_s(self) -> float:
        """Clock of the arm, seconds; ``now_ns``: nanoseconds."""
        return self.cluster.now_ns() / 1e9

    def spawn(self, role: str, mode: str) -> str:
        """Start a process."""
        return self._roster.spawn(role, mode)

    def send(self, process: str, message: Message) -> bool:
        """Send; a rank hears of the faults armed for it before it joins."""
        if isinstance(message, Join):
            self.injector.arm(process, message.rank)
        if isinstance(message, Stop):
            self._roster.asked_ns.setdefault(process, self.now_ns())
        return self.cluster.send(process, message)

    def kill(self, process: str) -> None:
        """SIGKILL."""
        self._roster.asked_ns.setdefault(process, self.now_ns())
        self.cluster.signal(process, signals.SIGKILL)

    def signal(self, process: str, signum: int) -> None:
        """Any signal; for faults."""
        (self._keeping if self._keeping.owns(process) else self.cluster).signal(process, signum)

    def mark(self, process: str) -> Mark:
        """Progress mark."""
        return self.cluster.mark(process)

    def os_state(self, process: str) -> str:
        """The kernel's word on a process."""
        return (self._keeping if self._keeping.owns(process) else self.cluster).os_state(process)

    @property
    def store(self) -> StoreControl | None:
        """The store, if it is a process."""
        return self.cluster.store

    @property
    def links(self) -> LinkControl | None:
        """What shapes connections between ranks."""
        return self.cluster.links

    @property
    def machines(self) -> MachineControl | None:
        """Of nodes as a whole."""
        return self.cluster.machines

    def process_of(self, rank: int) -> str | None:
        """Who holds a rank, if alive."""
        process = self.controller.process_of(rank)
        return None if process is None or self._roster.gone(process) else process

    def spare(self, index: int) -> str | None:
        """Who waits as spare."""
        ready = self.controller.ready_spares
        return ready[index] if index < len(ready) else None

    def on_node(self, node: int) -> list[str]:
        """Who lives on a node."""
        return [*self._roster.on_node(node), *self._keeping.on(node)]

    def node_of(self, process: str) -> int | None:
        """Where a rank or spare is."""
        return self._roster.node_of(process)

    def device_of(self, process: str) -> str | None:
        """Where it was started."""
        return self._roster.device_of(process)

    def refuse_device(self, process: str) -> str:
        """Its device takes nobody any more."""
        return self._roster.refuse_device(process)

    def accept_device(self, process: str) -> None:
        """It does again."""
        self._roster.accept_device(process)

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something later, if the arm still runs then."""
        self._later.append((self.now_ns() + int(delay_s * 1e9), action))

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event; injector and watcher hear of it."""
        event = self._write(kind, step=step, generation=generation, **data)
        self.injector.observe(event)
        self._tally.observe(event)
        if kind in _TRIGGER_KINDS and self.controller.generation > (
            kind is Kind.GENERATION_STARTED
        ):
            self.injector.on_event(_TRIGGER_KINDS[kind])
        if kind is Kind.GENERATION_STARTED and data["state"] == "checkpoint":
            self.injector.on_event("restore")
        if kind is Kind.GENERATION_READY:
            self._trained = True
            self.injector.on_training()
            if self.controller.generation > 1:
                self.injector.on_event("recovered")
        return event

    def _write(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        self._writer.generation = self.controller.generation
        event = self._writer.write(kind, step=step, generation=generation, **data)
        self._watcher.on_event(self.setup, event)
        return event

    def _rank_of(self, process: str) -> int | None:
        members = self.controller.members
        return members.index(process) if process in members else None
