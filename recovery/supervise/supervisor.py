"""Supervises the processes of a host: brings their reports to the controller, and what it orders to
them. ``recovery.cli.script_job`` runs a script with it, ``harness.run.orchestrator`` an arm.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.events.log import EventWriter, Kind
from trainchaos.recovery.health.checks import Spot
from trainchaos.recovery.health.reputation import Reputation
from trainchaos.recovery.policy.strategy import Strategy
from trainchaos.recovery.process.host import Dying, Exited, Hands, Host, MessageReceived, Report
from trainchaos.recovery.process.stacks import STACK_SIGNAL, keep
from trainchaos.recovery.supervise.controller import Controller
from trainchaos.recovery.supervise.keeper_log import KeeperLog
from trainchaos.recovery.supervise.loop import Loop
from trainchaos.recovery.supervise.supervision import StopFlag, Timing
from trainchaos.recovery.transport.wire import Message, Stop

TICK_S = 0.02
DRAIN_LIMIT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class JobSize:
    """``world``: ranks; ``shards``: of one copy of the model; ``steps``: 0 until a rank says it."""

    world: int
    shards: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class StartedProcess:
    """A process that was just started, and where."""

    name: str
    pid: int
    node: int
    device: str


class Roster(ABC):
    """The processes of a job: where each is started, and which there are. ``pids``: of those whose
    exit is not known; ``reputation``: of its places. Also ``recovery.health.reputation.Places``.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.reputation = Reputation(now_s)
        self.pids: dict[str, int] = {}
        self._spots: dict[str, Spot] = {}

    @abstractmethod
    def start(self, role: str, mode: str) -> StartedProcess:
        """Start a process under the next free name: ``w<n>``, or ``s<n>`` for one that starts as
        spare. Raises NoPlaceLeft, InfrastructureError.
        """

    def started(self, name: str, pid: int, spot: Spot) -> StartedProcess:
        """A process was started there."""
        self.pids[name], self._spots[name] = pid, spot
        return StartedProcess(name=name, pid=pid, node=spot[0], device=spot[1])

    @abstractmethod
    def expect(self, role: str, mode: str, count: int) -> None:
        """So many calls of ``start`` follow at once."""

    def distrust(self, name: str) -> None:
        """A process is replaced for its values."""
        if name in self._spots:
            self.reputation.distrust(self._spots[name])

    # ---- which there are, and where

    def there(self) -> list[str]:
        """Processes whose exit is not known."""
        return list(self.pids)

    def living(self) -> list[str]:
        """Those of them that were not asked to end."""
        return self.there()

    def gone(self, process: str) -> bool:
        """Whether its exit is known."""
        return process not in self.pids

    def exited(self, report: Exited) -> int:
        """The exit is known, and its place is free; returns the pid that the process had."""
        return self.pids.pop(report.process)

    def forget(self, name: str) -> None:
        """Its exit was answered as well."""
        self._spots.pop(name, None)

    def spot_of(self, name: str) -> Spot | None:
        """Node and device of a process that is not forgotten."""
        return self._spots.get(name)

    def spots_in_use(self) -> set[Spot]:
        """Those of processes whose exit is not answered yet."""
        return set(self._spots.values())

    def node_of(self, process: str) -> int | None:
        """Its node."""
        spot = self._spots.get(process)
        return None if spot is None else spot[0]

    def device_of(self, process: str) -> str | None:
        """Its device, by a name that no other of the job has."""
        spot = self._spots.get(process)
        return None if spot is None else spot[1]


class Supervisor(Loop):
    """One job under one strategy. Implements ``recovery.process.host.Hands``. ``outputs``:
    folder in which stacks of processes are kept; ``asked_ns``: when each was first asked to end, if
    it was. Who makes it sets ``roster`` and ``keepers``.
    """

    roster: Roster
    keepers: KeeperLog

    def __init__(
        self,
        host: Host,
        strategy: Strategy,
        log: EventWriter,
        size: JobSize,
        *,
        timing: Timing,
        store_port: int,
        stop_flag: StopFlag,
        outputs: Path,
    ) -> None:
        super().__init__(log, stop_flag)
        self.host, self.strategy = host, strategy
        self.mark, self.os_state, self.pulse = host.mark, host.os_state, host.pulse
        self.pid = host.pid
        self._size, self._timing, self._outputs = size, timing, outputs
        self.asked_ns: dict[str, int] = {}
        self.controller = self.new_controller(self, store_port)

    def new_controller(self, hands: Hands, store_port: int) -> Controller:
        """A controller that knows nothing of the job yet."""
        return Controller(
            self.strategy,
            hands,
            world=self._size.world,
            shards=self._size.shards,
            steps=self._size.steps,
            store_port=store_port,
            timing=self._timing,
        )

    def supervise(self, act: Callable[[Controller], None]) -> None:
        """Let the controller act, if there is one now."""
        act(self.controller)

    # ---- the job

    @property
    def generation(self) -> int:
        return self.controller.generation

    @property
    def committed(self) -> int:
        """Steps committed so far, from the ranks' progress counters."""
        return self.controller.committed

    @property
    def outcome(self) -> str:
        return self.controller.outcome

    @property
    def reason(self) -> str:
        return self.controller.reason

    @property
    def over(self) -> bool:
        return self.controller.done

    def process_of(self, rank: int) -> str | None:
        """The living process that holds a rank."""
        process = self.controller.job.process_of(rank)
        return None if process is None or self.roster.gone(process) else process

    def turn(self) -> None:
        """Wait for reports, and let the controller act on them, and on what clocks and marks
        show.
        """
        reports = self.host.wait(self.look_in_s)
        self.note_nodes()
        for report in reports:
            self.hear(report)
        self.after_reports()
        self.keepers.look()
        self.look()

    @property
    def look_in_s(self) -> float:
        """Seconds until the next look."""
        return self.controller.look_in_s

    def look(self) -> None:
        """Have the controller look at clocks and marks."""
        self.supervise(self.tick)

    @abstractmethod
    def after_reports(self) -> None:
        """The reports of a turn have been acted on."""

    def tick(self, controller: Controller) -> None:
        """Let the controller look at clocks and marks."""
        controller.tick()

    def stop(self, outcome: str, reason: str) -> None:
        self.supervise(lambda controller: controller.stop(outcome, reason))

    def fail(self, outcome: str, reason: str) -> None:
        if not self.controller.outcome:
            self.controller.outcome, self.controller.reason = outcome, reason

    def end_processes(self) -> None:
        """Wait until every process is reaped and its exit recorded, killing those that do not end
        by themselves.
        """
        for name in self.roster.there() if not self.over else ():
            self.kill(name)
        # After an error the controller gets no exits: it would answer each with a new process.
        hear = self.hear if self.over else self.note_exit
        deadline_ns = self.host.now_ns() + int(DRAIN_LIMIT_S * 1e9)
        while self.roster.there() and self.host.now_ns() < deadline_ns:
            for report in self.host.wait(TICK_S):
                if isinstance(report, Exited):
                    hear(report)
        self.keepers.end()

    # ---- reports

    def hear(self, report: Report) -> None:
        """Record what happened to a process, and tell the controller."""
        if isinstance(report, MessageReceived):
            self.on_message(report)
        elif isinstance(report, Dying):
            self.supervise(lambda controller: controller.on_dying(report.process))
        else:
            self.note_exit(report)
            self.supervise(lambda controller: controller.on_exit(report.process, report.how))
            self.roster.forget(report.process)

    def on_message(self, report: MessageReceived) -> None:
        """A process sent a message."""
        self.supervise(lambda controller: controller.on_message(report.process, report.message))

    def note_exit(self, report: Exited) -> None:
        """Record an exit."""
        name = report.process
        pid = self.roster.exited(report)
        self.record(
            Kind.PROCESS_EXITED,
            process=name,
            pid=pid,
            exit_code=report.exit_code,
            signal=report.signal,
            expected=self.controller.job.exit_was_expected(name),
            last_seq=self.mark(name).last_seq,
            asked_ns=self.asked_ns.get(name),
        )

    def note_nodes(self) -> None:
        """Record the nodes first: events on a node are judged by its description."""
        for news in self.host.news():
            self.record(news.kind, **news.data)

    # ---- hands of the controller, beside ``record``, ``mark``, ``os_state``, ``pulse`` and ``pid``

    def now_s(self) -> float:
        return self.host.now_ns() / 1e9

    def spawn(self, role: str, mode: str) -> str:
        started = self.roster.start(role, mode)
        self.record(
            Kind.PROCESS_SPAWNED,
            process=started.name,
            pid=started.pid,
            role=role,
            mode=mode,
            node=started.node,
            device=started.device,
        )
        return started.name

    def expect(self, role: str, mode: str, count: int) -> None:
        self.roster.expect(role, mode, count)

    def send(self, process: str, message: Message) -> bool:
        if isinstance(message, Stop):
            self.asked_ns.setdefault(process, self.host.now_ns())
        return self.host.send(process, message)

    def kill(self, process: str) -> None:
        self.asked_ns.setdefault(process, self.host.now_ns())
        self.host.signal(process, signal.SIGKILL)

    def distrust(self, process: str) -> None:
        self.roster.distrust(process)

    def ask_stacks(self, process: str) -> None:
        self.host.signal(process, STACK_SIGNAL)

    def stacks(self, process: str) -> tuple[str, str] | None:
        text = self.host.stacks(process)
        return None if text is None else (text, keep(self._outputs, process, text))
