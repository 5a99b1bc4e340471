"""The job of built-in ranks, as an arm plays it: its coordinator supervises it, and faults act on
it. Real and simulated processes share this code.

The coordinator is a controller that can be lost, with all its state; successors take over from the
log. What is around it (processes, injector, event log) belongs to the test, and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar, cast

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, EventWriter, Kind, read_actor
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.scenario.model import Scenario
from trainchaos.harness.arm.emulated_devices import EmulatedDevices, emulated
from trainchaos.harness.arm.in_force import ActiveEffects
from trainchaos.harness.arm.observer import ArmObserver, Timers, Vitals, Watcher, introduce, plan_of
from trainchaos.harness.arm.roster import ArmRoster
from trainchaos.harness.inject.injector import Injector
from trainchaos.harness.launch.launcher import ArmSetup, Cluster, Leftovers
from trainchaos.harness.run.arm_health import ArmHealth
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.recovery.health.reputation import NOT_OF_A_PLACE
from trainchaos.recovery.health.signs import ReportFile
from trainchaos.recovery.health.taints import about
from trainchaos.recovery.policy.strategy import StateFrom, Strategy
from trainchaos.recovery.process.host import Exited, Hands, MessageReceived, Report
from trainchaos.recovery.supervise.adoption import past
from trainchaos.recovery.supervise.controller import Controller, Stage
from trainchaos.recovery.supervise.keeper_log import KeeperLog
from trainchaos.recovery.supervise.supervision import StopFlag, Timing, check_limits
from trainchaos.recovery.supervise.supervisor import JobSize, Supervisor
from trainchaos.recovery.transport.wire import CheckpointNote, Extra, Join, Message


def timing_of(scenario: Scenario) -> Timing:
    """The default limits, overridden by those of the scenario."""
    said = scenario.timeouts
    return Timing().with_limits(hang_s=said.hang, park_s=said.park, join_s=said.join)


def refuse_clashing(scenario: Scenario) -> None:
    """Raise ScenarioError when limits are in the wrong order."""
    check_limits(timing_of(scenario))


FIRST_STATE = StateFrom.INITIAL  # an arm has a checkpoint directory of its own, which is empty
_T = TypeVar("_T")
_TRIGGER_KINDS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.FAILURE_DETECTED: "recovery_started",
        Kind.GENERATION_STARTED: "regroup",
        Kind.PLACE_CHECKED: "place_checked",
    }
)


class Orchestrator(Supervisor):
    """One arm. ``scene``: what faults see of it."""

    host: Cluster
    roster: ArmRoster

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
        self._absence: CoordinatorAbsence | None = None
        spec, events = setup.cell.scenario.workload, setup.run.events(setup.id)
        self._path = events / f"{ORCHESTRATOR}.jsonl"
        super().__init__(
            cluster,
            strategy,
            EventWriter(events, ORCHESTRATOR, cluster.now_ns),
            JobSize(world=spec.ranks, shards=spec.shards, steps=spec.steps),
            timing=timing or timing_of(setup.cell.scenario),
            store_port=cluster.store_port,
            stop_flag=stop,
            outputs=setup.run.logs(setup.id),
        )
        ledger, timers = Ledger(setup.run.ledger), Timers(cluster.now_ns)
        self.roster = ArmRoster(
            setup, cluster, ledger, self.asked_ns, spares=strategy.spares_wanted
        )
        self.keepers = KeeperLog(
            cluster.keepers,
            self.record,
            cluster.now_ns,
            starts=self.roster.will_undo,
            ended=self.roster.undone,
        )
        self.scene = BuiltInScene(setup, self, ledger, timers)
        self._health = ArmHealth(setup, cluster, self.scene, self.roster)
        plan = plan_of(setup, kinds, spares=strategy.spares_wanted)
        self._injector = Injector(self.scene, plan, kinds)
        self.observer = ArmObserver(setup, self, self._injector, timers, watcher)
        self._trained = False
        self._last_commit = (0, 0)  # step, and when it was first seen
        self._left: tuple[int, Leftovers] | None = None

    # ---- a coordinator that can be lost

    def new_controller(self, hands: Hands, store_port: int) -> Controller:
        self._hands = RevocableHands(hands, self.before_act)
        return super().new_controller(cast(Hands, self._hands), store_port)

    def before_act(self, act: str) -> None:
        """Called before each act of the coordinator; tests override it."""

    @property
    def has_coordinator(self) -> bool:
        """Whether a coordinator supervises the job now."""
        return self._absence is None

    def supervise(self, act: Callable[[Controller], None]) -> None:
        """Let the controller act, if there is one; it may be lost in the middle of that."""
        if self._absence is None:
            try:
                act(self.controller)
            except CoordinatorLost:
                pass

    def lose_coordinator(self, down_s: float) -> None:
        """Lose the controller with all its state, even in the middle of an act; another takes over
        ``down_s`` seconds later.
        """
        now_ns = int(self.now_s() * 1e9)
        self._hands.lost = True
        stage = self.controller.stage.value
        self._absence = CoordinatorAbsence(now_ns, now_ns + int(down_s * 1e9), stage)
        self.host.away()

    def _take_over(self, absence: CoordinatorAbsence) -> None:
        """Start the next controller, and have it hear the messages that arrived meanwhile."""
        self.host.back()
        events = read_actor(self._path).events
        known = past(events, self.asked_ns)
        self._absence = None
        self.controller = self.new_controller(self, self.host.store_port)
        self.record(
            Kind.COORDINATOR_ADOPTED,
            generation=known.generation,
            down_s=round(self.now_s() - absence.since_ns / 1e9, 6),
            events=len(events),
            members=list(known.members),
            stage=absence.stage,
        )
        self.supervise(lambda controller: controller.adopt(known, FIRST_STATE))
        for report in absence.held:
            if isinstance(report, MessageReceived):
                self.hear(report)

    # ---- the job

    def introduce(self) -> None:
        """Describe the job by its scenario."""
        setup, scenario = self._setup, self._setup.cell.scenario
        spec = scenario.workload
        introduce(
            setup,
            self.record,
            self.host.identity(),
            self.strategy.spares_wanted,
            order={"seed": setup.seed, "samples": setup.data.samples},
            checkpoint_every=spec.checkpoint.every,
            data=setup.data.about,
            data_digest=setup.data.digest,
            launcher=scenario.launcher.kind,
            evaluate=spec.evaluate.due if spec.evaluate else {},
            monitored=True,
        )

    def start(self) -> None:
        """Record the nodes of the job, and which of its places are tainted; have the coordinator
        start the first processes.
        """
        self.note_nodes()
        tainted = self.host.tainted
        if tainted.taints:
            self.record(
                Kind.TAINTS_HONOURED,
                taints=about(tainted.taints),
                nodes=sorted(tainted.nodes),
                devices=sorted(tainted.devices),
            )
        self.observer.before_start()
        self.supervise(lambda controller: controller.start(FIRST_STATE))
        self._health.start()
        self._last_commit = (0, self.host.now_ns())

    def turn(self) -> None:
        if self.committed > self._last_commit[0]:
            self._last_commit = (self.committed, self.host.now_ns())
        super().turn()
        self._injector.tick(self.committed)

    def after_reports(self) -> None:
        """Start the next coordinator, if it is due."""
        absence, at_once = self._absence, bool(self.stop_flag.signum)
        if absence is not None and (at_once or self.now_s() * 1e9 >= absence.until_ns):
            self._take_over(absence)

    def tick(self, controller: Controller) -> None:
        controller.store_is_at(self.host.store_port)
        controller.tick()

    @property
    def ending(self) -> bool:
        """Whether the controller is ending its processes."""
        return self.controller.stage is Stage.ENDING

    def settle(self) -> None:
        """Record what health monitors find, and warn the coordinator of what will fail."""
        self._health.look(self.supervise)

    def vitals(self) -> Vitals:
        """Count healthy replicas by live processes, once a generation has trained."""
        place = self._setup.cell.scenario.topology
        held = [rank for rank in range(place.ranks) if self.process_of(rank)]
        return Vitals(
            progress_ns=self._last_commit[1], healthy=place.whole(held) if self._trained else None
        )

    def out_of_patience(self) -> tuple[str, str] | None:
        """Always None: the controller bounds its own waits, and gives up by itself."""
        return None

    def release(self) -> None:
        committed = self.committed  # read from the marks, which end with the cluster
        self._health.close()
        leftovers = self.host.close()
        self._left = (committed, leftovers)
        self.roster.ended(leftovers)

    def account(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        assert self._left is not None
        committed, leftovers = self._left
        return vars(leftovers), {"committed_step": committed}

    # ---- reports

    def hear(self, report: Report) -> None:
        """Messages that no coordinator receives are kept for the next one; exits are in the log."""
        absence = self._absence
        says = isinstance(report, MessageReceived) and isinstance(report.message, Extra)
        if absence is None or says:
            super().hear(report)
            return
        if isinstance(report, Exited):
            self.note_exit(report)
        absence.held.append(report)

    def on_message(self, report: MessageReceived) -> None:
        """Pass it to the coordinator, or what a fault's agent says to the injector."""
        process, message = report.process, report.message
        if isinstance(message, Extra):
            members = self.controller.members
            rank = members.index(process) if process in members else None
            self._injector.on_said(process, rank, message)
            return
        super().on_message(report)
        if isinstance(message, CheckpointNote) and message.state in ("saving", "committed"):
            self._injector.on_event(f"checkpoint_{message.state}")

    def send(self, process: str, message: Message) -> bool:
        """Send; a rank learns of the faults armed for it before it joins."""
        if isinstance(message, Join):
            self._injector.arm(process, message.rank)
        return super().send(process, message)

    def record(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """Write an event; triggers of faults that wait for such an event fire."""
        event = super().record(kind, step=step, generation=generation, **data)
        fails = kind is Kind.FAILURE_DETECTED and data["process"] is not None
        if fails and data["cause"] not in NOT_OF_A_PLACE:
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


class BuiltInScene:
    """Implements ``harness.arm.fault_context.Scene``."""

    def __init__(self, setup: ArmSetup, arm: Orchestrator, ledger: Ledger, timers: Timers) -> None:
        self._arm, roster, cluster = arm, arm.roster, arm.host
        self.setup, self.ledger, self.in_force = setup, ledger, ActiveEffects()
        self.health = ReportFile(setup.run.root / "health" / f"{setup.id}.jsonl")
        self.surface, self.send, self.now_ns = cluster, cluster.send, cluster.now_ns
        self.record, self.later = arm.record, timers.later
        self.process_of, self.lose_coordinator = arm.process_of, arm.lose_coordinator
        self.node_of, self.device_of = roster.node_of, roster.device_of
        self.refuse_device, self.accept_device = roster.refuse_device, roster.accept_device
        self.devices = EmulatedDevices(
            emulated(setup.cell.scenario.faults),
            setup.cell.scenario.workload.ranks,
            device_of=lambda rank: self._of_rank(rank, roster.device_of),
            node_of=lambda rank: self._of_rank(rank, roster.node_of),
            seed=f"{setup.seed}/{setup.arm}",
        )

    @property
    def controller(self) -> Controller:
        """The controller that supervises, or did last."""
        return self._arm.controller

    @property
    def has_coordinator(self) -> bool:
        return self._arm.has_coordinator

    def signal(self, process: str, signum: int) -> None:
        """Signal a rank, a spare or a keeper."""
        self._holder_of(process).signal(process, signum)

    def os_state(self, process: str) -> str:
        """The kernel's state of a rank, a spare or a keeper."""
        return self._holder_of(process).os_state(process)

    def _of_rank(self, rank: int, what: Callable[[str], _T | None]) -> _T | None:
        process = self.process_of(rank)
        return None if process is None else what(process)

    def spare(self, index: int) -> str | None:
        ready = self.controller.job.ready_spares
        return ready[index] if index < len(ready) else None

    def on_node(self, node: int) -> list[str]:
        return [*self._arm.roster.on_node(node), *self._arm.keepers.on(node)]

    def _holder_of(self, process: str) -> Cluster | KeeperLog:
        return self._arm.keepers if self._arm.keepers.owns(process) else self._arm.host


class CoordinatorLost(Exception):
    """The coordinator was lost, possibly in the middle of an act."""


class RevocableHands:
    """``hands`` until they are ``lost``; every act raises then. ``before``: called before each act
    with its name; tests lose the coordinator there.
    """

    def __init__(self, hands: Hands, before: Callable[[str], None]) -> None:
        self.lost = False
        self._before = before
        for name in ("spawn", "send", "kill", "record", "distrust", "ask_stacks"):
            setattr(self, name, self._revocable(name, getattr(hands, name)))
        for name in ("now_s", "expect", "mark", "os_state", "pulse", "pid", "stacks"):
            setattr(self, name, getattr(hands, name))

    def _revocable(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def check() -> None:
            if self.lost:
                raise CoordinatorLost

        @wraps(act)
        def revocable(*given: Any, **named: Any) -> Any:
            if not self.lost:
                self._before(name)
            check()
            done = act(*given, **named)
            check()
            return done

        return revocable


@dataclass
class CoordinatorAbsence:
    """A time without a coordinator, by the arm's clock. ``stage``: the job's stage when it began;
    ``held``: reports that arrived meanwhile.
    """

    since_ns: int
    until_ns: int
    stage: str
    held: list[Report] = field(default_factory=list)
