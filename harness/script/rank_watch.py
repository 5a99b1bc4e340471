"""Starts the command of an arm, once or several times, follows its ranks, and ends it with all that
it started. Reports and exits are processed in an order that ends a generation before its
replacement starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.inject.injector import Injector
from trainchaos.harness.script.listen.listening import CommandListener
from trainchaos.harness.script.listen.observer import Observer
from trainchaos.harness.script.point_broker import PointBroker
from trainchaos.harness.script.processes.command import Command
from trainchaos.harness.script.processes.environment import PreparedCommand
from trainchaos.harness.script.processes.finding import RankFinder
from trainchaos.harness.script.processes.leftovers import CommandLeftovers
from trainchaos.harness.script.processes.ranks import ExitedRank, Ranks
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.records import KillSession
from trainchaos.recovery.process.host import RecordEvent

SCAN_FORMING_S = 0.05  # between scans for ranks while some are missing
SCAN_STEADY_S = 0.5
TICK_S = 0.02
TERM_GRACE_S = 3.0  # from SIGTERM to the kill
NS = 1e9


@dataclass(kw_only=True)
class RankWatch:
    """Watches one arm, over all starts of its command. ``arm``: its id, for the ledger;
    ``holds_launcher``: a fault hits what the command is started as.

    ``command``: the running one, if any; ``starts``: so far; ``sign_ns``: time of the last sign of
    life; ``progress_ns``: time of the last new step or generation.
    """

    spec: WorkloadSpec
    prepared: PreparedCommand
    arm: str
    holds_launcher: bool
    ledger: Ledger
    ranks: Ranks
    finder: RankFinder
    listener: CommandListener
    observer: Observer
    broker: PointBroker
    injector: Injector
    leftovers: CommandLeftovers
    record: RecordEvent
    now_ns: Callable[[], int]

    def __post_init__(self) -> None:
        self.command: Command | None = None
        self.starts = 0
        self.sign_ns = self.progress_ns = self.now_ns()
        self._undo = ""  # ledger record of the running command
        self._left: list[dict[str, Any]] = []  # processes that outlived it
        self._asked_ns = 0  # since when processes are asked to end; 0: they are not
        self._scan_ns = self._generation = 0
        self._gone: list[ExitedRank] = []  # noticed, and not yet recorded
        self._members: dict[int, str] = {}
        self._most: dict[int, str] = {}  # of all that were found at once
        self._missing = True

    # ---- the command

    def start(self) -> str:
        """Start the command. Returns why it could not be started, or "". Raises InfrastructureError
        if its guard could not be started.
        """
        self.starts += 1
        prepared = self.prepared
        self.command = command = Command.start(
            prepared.argv, directory=prepared.directory, env=prepared.env, output=prepared.output
        )
        self.sign_ns, self._missing = self.now_ns(), True
        if command.error:
            return command.error
        undo = KillSession.of(command.guard_pid, "guard of the command")
        self._undo = self.ledger.will(undo, arm=self.arm, process="command")
        self.ranks.register(command.fileno())
        argv = list(prepared.argv)
        self.record(Kind.COMMAND_STARTED, attempt=self.starts, pid=command.pid, argv=argv)
        if self.holds_launcher:
            name = f"launcher{self.starts}"
            self.ranks.hold_launcher(name, command.pid)
            self._spawned(process=name, pid=command.pid, role="launcher")
        return ""

    def _spawned(self, **about: Any) -> None:
        self.record(Kind.PROCESS_SPAWNED, mode="script", **about)

    def close(self, *, asked: bool) -> int:
        """End the command and all its descendants; returns how many processes could not be killed.
        ``asked``: the harness ends it.
        """
        command, self.command = self.command, None
        if command is None:
            return 0
        self.wait(0.0)
        self.take_exits()  # a process that has ended already was not asked to
        self._asked_ns = self.now_ns()
        if command.pid:
            if command.ended is None:
                command.terminate()
            self._await(command, lambda: command.ended is None)
            self.ranks.unregister(command.fileno())
        unkilled = command.close(self.prepared.mark)
        self._await(None, lambda: bool(self.ranks.living()))
        self._asked_ns = 0
        if command.ended is not None:
            self.record(
                Kind.COMMAND_ENDED,
                attempt=self.starts,
                exit_code=command.ended.exit_code,
                signal=command.ended.signal,
                asked=asked,
                killed=command.killed,
                left=self._left,
            )
        self._left = []
        if self._undo and not unkilled:
            self.ledger.undone(self._undo, "ended")
        self._undo = ""
        return unkilled

    def _await(self, command: Command | None, lives: Callable[[], bool]) -> None:
        """Record exits while it lives, for a while."""
        deadline = time.monotonic() + TERM_GRACE_S
        while lives() and time.monotonic() < deadline:
            self.wait(TICK_S)
            self.take_exits()
            if command is not None:
                command.look()

    def note_left(self, command: Command, *, well: bool) -> None:
        """Note the processes that outlive a command, before they are ended too."""
        self._left = self.leftovers.processes(command.guard_pid, command.pid, well=well)

    # ---- its ranks

    def wait(self, timeout_s: float) -> None:
        """Wait for the exit of a rank, or news of the command."""
        self._gone += self.ranks.wait(timeout_s)

    def listen(self) -> None:
        """Read new output; of ranks that have just ended all of it, as others write after them."""
        self.listener.listen()
        if self._gone:
            mine = set(self.observer.members.values())
            self.listener.hear_out(over=bool(mine) and mine.isdisjoint(self.ranks.living()))

    def find_ranks(self, command: Command) -> bool:
        """Scan for ranks, if a scan is due; returns whether it was. A generation starts once all
        ranks have been found.
        """
        now = self.now_ns()
        changing, spoken = self._missing or self.observer.failing, self.listener.waiting
        early = (now - self._scan_ns) / NS < (SCAN_FORMING_S if changing else SCAN_STEADY_S)
        if early and not (changing and spoken):
            return False
        self._scan_ns = now
        found = self.finder.find(command, self.listener.hints, spoken=spoken)
        sure, unsettled = self.ranks.settled(found, now / NS, spoken=spoken)
        members, new = self.ranks.hold(sure)
        self.leftovers.look(command.guard_pid, self.ranks.name_of)
        for rank in new:
            self.sign_ns = now
            one = rank.found
            self._spawned(process=rank.name, pid=one.pid, role="worker", rank=one.rank)
        strangers = set(members.values()) - set(self.observer.members.values())
        if not strangers and self.observer.generation:
            self._missing = unsettled
            return True
        self._members = members
        self._most = max(self._most, members, key=len)
        due = self.ranks.world or self.spec.ranks
        self._missing = unsettled or not members or len(members) < due
        if not self._missing:
            # the reports and exits of the old ranks come before those of their replacements
            self.wait(0.0)
            self.listen()
            self.take_progress(self.ranks.ended(self.observer.members.values()))
            self.take_exits()
            self.observer.on_ranks(members, now)
        return True

    def take_progress(self, pids: Set[int] | None = None) -> None:
        """Process reported steps, once all ranks have been found or are overdue. ``pids``: only the
        reports of these processes.
        """
        if self._missing and self.listener.overdue():
            self._miss_no_more(self._members)
        if self._missing:
            return
        before = (self.observer.generation, self.observer.committed)
        beyond = self.observer.last_said if self._gone else None
        for progress in self.listener.take(pids, beyond=beyond):
            reports = self.observer.reports
            self.observer.on_progress(self.finder.whose(progress), self.now_ns())
            self.arm_generation()
            if self.observer.reports > reports and self.observer.first_of_generation:
                self.injector.on_training()
        if (self.observer.generation, self.observer.committed) != before:
            self.sign_ns = self.progress_ns = self.now_ns()

    def _miss_no_more(self, members: dict[int, str]) -> None:
        """Make do with the ranks that were found."""
        if members and not self.observer.generation:
            self.observer.on_ranks(members, self.now_ns())
        self._missing = False

    def take_last_words(self, *, well: bool) -> None:
        """The command has ended: process all its output, whether or not its ranks were found.
        ``well``: without an error.
        """
        self.wait(0.0)
        self._miss_no_more(self._most)
        self.take_exits()
        while self.listener.behind:
            self.listener.listen()
            self.take_progress()
        self.listener.listen(to_end=True)
        self.listener.hear_out(over=True, sure=well)
        self.take_progress()

    def take_exits(self) -> None:
        """Record the exits noticed. A process that was asked to end, or killed with the command,
        has not failed.
        """
        while self._gone:
            gone = self._gone.pop(0)
            asked = {"asked_ns": self._asked_ns} if self._asked_ns else {}
            ended = (gone.name, gone.exit_code, gone.signal)
            # one that was told to end: what it made of that comes before its end
            if not asked and gone.exit_code == 0:
                self.observer.on_exit(*ended, self.now_ns())
            self.record(
                Kind.PROCESS_EXITED,
                process=gone.name,
                pid=gone.pid,
                exit_code=gone.exit_code,
                signal=gone.signal,
                expected=bool(asked) or gone.exit_code == 0,
                last_seq=None,
                **asked,
            )
            if not asked and gone.exit_code != 0:
                self.observer.on_exit(*ended, self.now_ns())

    def arm_generation(self) -> None:
        """Arm the ranks of a new generation with the faults that wait for them, as for built-in
        workloads.
        """
        if self.observer.generation == self._generation:
            return
        self._generation = self.observer.generation
        self.sign_ns = self.now_ns()
        self.broker.forget()
        for rank, process in self.observer.members.items():
            self.injector.arm(process, rank)
        if self._generation > 1:
            self.injector.on_event("regroup")
