"""The job of built-in ranks, as an arm plays it: its coordinator supervises it, and faults act on
it.

Real and simulated processes share this code. ``harness.arm.loop`` has the loop around it;
``harness.run.scene`` is what faults see of it.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.chaos.fault.base import Fault
from trainchaos.harness.arm.job import ClosingFacts, OpeningFacts, Vitals
from trainchaos.harness.arm.loop import ArmLoop, plan_of
from trainchaos.harness.arm.timers import Timers
from trainchaos.harness.arm.watching import Watcher
from trainchaos.harness.inject.injector import Injector
from trainchaos.harness.launch.launcher import (
    ArmSetup,
    Cluster,
    Exited,
    Leftovers,
    MessageReceived,
    Report,
)
from trainchaos.harness.run.arm_health import ArmHealth
from trainchaos.harness.run.coordinator import Coordinator
from trainchaos.harness.run.scene import BuiltInScene
from trainchaos.harness.run.timeouts import timing_of
from trainchaos.recovery.health.taints import about
from trainchaos.recovery.policy.strategy import Strategy
from trainchaos.recovery.process.local import Dying
from trainchaos.recovery.process.stacks import STACK_SIGNAL, keep
from trainchaos.recovery.supervise.controller import Controller, Stage, Timing
from trainchaos.recovery.supervise.supervision import Hands, StopFlag
from trainchaos.recovery.transport.wire import (
    CheckpointNote,
    Extra,
    Join,
    Message,
    Stop,
)

TICK_S = 0.02
DRAIN_LIMIT_S = 10.0
_TRIGGER_KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.FAILURE_DETECTED: "recovery_started",
        Kind.GENERATION_STARTED: "regroup",
        Kind.PLACE_CHECKED: "place_checked",
    }
)


class Orchestrator:
    """One arm. Implements ``harness.arm.job.ArmJob``, and for its coordinator
    ``recovery.supervise.supervision.Hands``.
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
        self._setup = setup
        self._cluster = cluster
        self._strategy = strategy
        self._stop = stop
        self._timing = timing or timing_of(setup.cell.scenario)
        self.mark, self.os_state, self.pulse = cluster.mark, cluster.os_state, cluster.pulse
        log = setup.run.events(setup.id) / f"{ORCHESTRATOR}.jsonl"
        self._coordinator = Coordinator(self._new_controller, self, log, self.before_act)
        spares, timers = strategy.spares_wanted, Timers(cluster.now_ns)
        self.scene = BuiltInScene(
            setup, cluster, self._coordinator, timers, record=self.record, spares=spares
        )
        self._roster, self._keepers = self.scene.roster, self.scene.keepers
        self._health = ArmHealth(setup, cluster, self.scene, self.record)
        plan = plan_of(setup, kinds, spares=spares)
        self._injector = Injector(self.scene, plan, kinds)
        self._loop = ArmLoop(
            setup,
            self,
            self._injector,
            timers,
            watcher=watcher,
            stop=stop,
            now_ns=cluster.now_ns,
        )
        self._trained = False
        self._last_commit = (0, 0)  # step, and when it was first seen
        self._left: tuple[int, Leftovers] | None = None

    def _new_controller(self, hands: Hands) -> Controller:
        spec = self._setup.cell.scenario.workload
        return Controller(
            self._strategy,
            hands,
            world=spec.ranks,
            shards=spec.shards,
            steps=spec.steps,
            store_port=self._cluster.store_port,
            timing=self._timing,
        )

    def before_act(self, act: str) -> None:
        """Called before each act of the coordinator; tests override it."""

    def run(self) -> str:
        """Play the arm to its end and return the outcome. Every fault is healed and every process
        gone afterwards, also after an error.
        """
        return self._loop.run()

    # ---- the job, as the loop asks for it

    @property
    def controller(self) -> Controller:
        """The controller that supervises, or did last."""
        return self._coordinator.controller

    @property
    def generation(self) -> int:
        """The controller's."""
        return self.controller.generation

    @property
    def committed(self) -> int:
        """The controller's count, from the ranks' progress counters."""
        return self.controller.committed

    @property
    def outcome(self) -> str:
        """The controller's."""
        return self.controller.outcome

    @property
    def reason(self) -> str:
        """The controller's."""
        return self.controller.reason

    @property
    def ending(self) -> bool:
        """Whether the controller is ending its processes."""
        return self.controller.stage is Stage.ENDING

    @property
    def over(self) -> bool:
        """Whether the controller has ended them."""
        return self.controller.done

    def introduce(self) -> OpeningFacts:
        """Describe the job by its scenario."""
        setup, scenario = self._setup, self._setup.cell.scenario
        spec = scenario.workload
        return OpeningFacts(
            process=self._cluster.identity(),
            spares=self._strategy.spares_wanted,
            facts={
                "order": {"seed": setup.seed, "samples": setup.data.samples},
                "checkpoint_every": spec.checkpoint.every,
                "data": setup.data.about,
                "data_digest": setup.data.digest,
                "launcher": scenario.launcher.kind,
                "evaluate": spec.evaluate.due if spec.evaluate else {},
                "monitored": True,
            },
        )

    def prepare(self) -> None:
        """Record the nodes of the job, and which of its places are tainted."""
        self._note_nodes()
        tainted = self._cluster.tainted
        if tainted.taints:
            self.record(
                Kind.TAINTS_HONOURED,
                taints=about(tainted.taints),
                nodes=sorted(tainted.nodes),
                devices=sorted(tainted.devices),
            )

    def start(self) -> None:
        """Have the coordinator start the first processes."""
        self._coordinator.start()
        self._health.start()
        self._last_commit = (0, self._cluster.now_ns())

    def turn(self) -> None:
        """Wait for reports, let the coordinator act on them, then the injector."""
        if self.committed > self._last_commit[0]:
            self._last_commit = (self.committed, self._cluster.now_ns())
        reports = self._cluster.wait(self.controller.look_in_s)
        self._note_nodes()
        for report in reports:
            self._hear(report)
        if self._coordinator.due(at_once=bool(self._stop.signum)):
            self._take_over()
        self._keepers.look()
        self._coordinator.supervise(lambda c: c.store_is_at(self._cluster.store_port))
        self._coordinator.supervise(lambda c: c.tick())
        self._injector.tick(self.committed)

    def settle(self) -> None:
        """Record what health monitors find, and warn the coordinator of what will fail."""
        self._health.look(self._coordinator)

    def vitals(self) -> Vitals:
        """Count healthy replicas by live processes, once a generation has trained."""
        place = self._setup.cell.scenario.topology
        held = [rank for rank in range(place.ranks) if self.scene.process_of(rank)]
        return Vitals(
            progress_ns=self._last_commit[1], healthy=place.whole(held) if self._trained else None
        )

    def out_of_patience(self) -> tuple[str, str] | None:
        """Always None: the controller bounds its own waits, and gives up by itself."""
        return None

    def stop(self, outcome: str, reason: str) -> None:
        """Have the coordinator end the job, if there is one now."""
        self._coordinator.supervise(lambda c: c.stop(outcome, reason))

    def fail(self, outcome: str, reason: str) -> None:
        """Record how an error ended the arm."""
        if not self.controller.outcome:
            self.controller.outcome, self.controller.reason = outcome, reason

    def end_processes(self) -> None:
        """Wait until every process is reaped and its exit recorded, killing those that do not end
        by themselves.
        """
        for name in self._roster.there() if not self.over else ():
            self.kill(name)
        # After an error the controller gets no exits: it would answer each with a new process.
        hear = self._hear if self.over else self._note_exit
        deadline = self._cluster.now_ns() + int(DRAIN_LIMIT_S * 1e9)
        while self._roster.there() and self._cluster.now_ns() < deadline:
            for report in self._cluster.wait(TICK_S):
                if isinstance(report, Exited):
                    hear(report)
        self._keepers.end()

    def release(self) -> None:
        """Close the cluster."""
        committed = self.committed  # read from the marks, which end with the cluster
        self._health.close()
        leftovers = self._cluster.close()
        self._left = (committed, leftovers)
        self._roster.ended(leftovers)

    def account(self) -> ClosingFacts:
        """From the closed cluster."""
        assert self._left is not None
        committed, leftovers = self._left
        return ClosingFacts(
            leftovers={
                "processes": leftovers.processes,
                "ports": leftovers.ports,
                "shared_memory": leftovers.shared_memory,
            },
            finished={"committed_step": committed},
        )

    # ---- reports

    def _hear(self, report: Report) -> None:
        if isinstance(report, Exited):
            self._note_exit(report)
        if self._coordinator.misses(report):
            return
        if isinstance(report, MessageReceived):
            self._on_said(report)
        elif isinstance(report, Dying):
            self._coordinator.supervise(lambda c: c.on_dying(report.process))
        else:
            self._coordinator.supervise(lambda c: c.on_exit(report.process, report.how))

    def _take_over(self) -> None:
        self._cluster.back()
        for report in self._coordinator.take_over(self._roster.asked_ns):
            self._hear(report)

    def _on_said(self, report: MessageReceived) -> None:
        message = report.message
        if isinstance(message, Extra):
            self._injector.on_said(report.process, self._rank_of(report.process), message)
            return
        self._coordinator.supervise(lambda c: c.on_message(report.process, message))
        if isinstance(message, CheckpointNote) and message.state in ("saving", "committed"):
            self._injector.on_event(f"checkpoint_{message.state}")

    def _note_exit(self, report: Exited) -> None:
        pid = self._roster.note_exit(report)
        self.record(
            Kind.PROCESS_EXITED,
            process=report.process,
            pid=pid,
            exit_code=report.exit_code,
            signal=report.signal,
            expected=self.controller.exit_was_expected(report.process),
            last_seq=self._cluster.mark(report.process).last_seq,
            asked_ns=self._roster.asked_ns.get(report.process),
        )

    def _note_nodes(self) -> None:
        """Record the nodes first: events on a node are judged by its description."""
        for news in self._cluster.news():
            self.record(news.kind, **news.data)

    def _rank_of(self, process: str) -> int | None:
        members = self.controller.members
        return members.index(process) if process in members else None

    # ---- hands of the coordinator, beside ``mark``, ``os_state`` and ``pulse``

    def now_s(self) -> float:
        """The arm's clock, in seconds."""
        return self._cluster.now_ns() / 1e9

    def spawn(self, role: str, mode: str) -> str:
        """Start a process."""
        return self._roster.spawn(role, mode)

    def expect(self, role: str, mode: str, count: int) -> None:
        """Start them one by one: an arm has few."""

    def send(self, process: str, message: Message) -> bool:
        """Send; a rank learns of the faults armed for it before it joins."""
        if isinstance(message, Join):
            self._injector.arm(process, message.rank)
        if isinstance(message, Stop):
            self._roster.asked_ns.setdefault(process, self._cluster.now_ns())
        return self._cluster.send(process, message)

    def kill(self, process: str) -> None:
        """SIGKILL."""
        self._roster.asked_ns.setdefault(process, self._cluster.now_ns())
        self._cluster.signal(process, signals.SIGKILL)

    def distrust(self, process: str) -> None:
        """Avoid its device."""
        self._roster.distrust(process)

    def pid(self, process: str) -> int | None:
        """Of a process that its launcher starts on this machine."""
        return self._cluster.pid(process)

    def ask_stacks(self, process: str) -> None:
        """Ask for its stacks."""
        self._cluster.signal(process, STACK_SIGNAL)

    def stacks(self, process: str) -> tuple[str, str] | None:
        """Its answer, kept beside the arm's outputs."""
        text = self._cluster.stacks(process)
        folder = self._setup.run.logs(self._setup.id)
        return None if text is None else (text, keep(folder, process, text))

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event; triggers of faults that wait for such an event fire."""
        event = self._loop.record(kind, step=step, generation=generation, **data)
        if kind is Kind.FAILURE_DETECTED:
            self._health.failed(data["process"], data["cause"], data["detail"])
        if kind in _TRIGGER_KINDS and self.generation > (kind is Kind.GENERATION_STARTED):
            self._injector.on_event(_TRIGGER_KINDS[kind])
        if kind is Kind.GENERATION_STARTED and data["state"] == "checkpoint":
            self._injector.on_event("restore")
        if kind is Kind.GENERATION_READY:
            self._trained = True
            self._injector.on_training()
            if self.generation > 1:
                self._injector.on_event("recovered")
        return event
