"""Follows the ranks of a command: finds them, and processes their reports and exits in an order
that ends a generation before its replacement starts.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.inject.injector import Injector
from trainchaos.harness.script.listen.listening import CommandListener
from trainchaos.harness.script.listen.observer import Observer
from trainchaos.harness.script.point_broker import PointBroker
from trainchaos.harness.script.processes.command import Command
from trainchaos.harness.script.processes.leftovers import CommandLeftovers
from trainchaos.harness.script.processes.ranks import ExitedRank, Ranks
from trainchaos.harness.script.rollcall import RollCall
from trainchaos.recovery.process.host import RecordEvent

SCAN_FORMING_S = 0.05  # between scans for ranks while some are missing
SCAN_STEADY_S = 0.5
NS = 1e9


@dataclass(kw_only=True)
class RankWatch:
    """Watches one arm, over all starts of its command.

    ``sign_ns``: time of the last sign of life; ``progress_ns``: time of the last new step or
    generation; ``asked_ns``: since when processes are asked to end, 0 if they are not.
    """

    spec: WorkloadSpec
    ranks: Ranks
    roll: RollCall
    listener: CommandListener
    observer: Observer
    broker: PointBroker
    injector: Injector
    leftovers: CommandLeftovers
    record: RecordEvent
    now_ns: Callable[[], int]

    def __post_init__(self) -> None:
        self.sign_ns = self.progress_ns = self.now_ns()
        self.asked_ns = self._scan_ns = self._generation = 0
        self._gone: list[ExitedRank] = []  # noticed, and not yet recorded
        self._members: dict[int, str] = {}
        self._most: dict[int, str] = {}  # of all that were found at once
        self._missing = True

    def expect_ranks(self) -> None:
        """The command has just been started: its ranks are still to be found."""
        self.sign_ns = self.now_ns()
        self._missing = True

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
        every_s = SCAN_FORMING_S if changing else SCAN_STEADY_S
        early = (now - self._scan_ns) / NS < every_s
        if early and not (changing and spoken):
            return False
        self._scan_ns = now
        found = self.roll.find(command, self.listener.hints, spoken=spoken)
        sure, unsettled = self.ranks.settled(found, now / NS, spoken=spoken)
        members, new = self.ranks.hold(sure)
        self.leftovers.look(command.guard_pid, self.ranks.name_of)
        for rank in new:
            self.sign_ns = now
            self.record(
                Kind.PROCESS_SPAWNED,
                process=rank.name,
                pid=rank.found.pid,
                role="worker",
                mode="script",
                rank=rank.found.rank,
            )
        strangers = set(members.values()) - set(self.observer.members.values())
        if not strangers and self.observer.generation:
            self._missing = unsettled
            return True
        self._members = members
        self._most = max(self._most, members, key=len)
        self._missing = (
            unsettled or not members or len(members) < (self.ranks.world or self.spec.ranks)
        )
        if not self._missing:
            self._close_generation()
            self.observer.on_ranks(members, now)
        return True

    def _close_generation(self) -> None:
        """Process the reports and exits of the old ranks before those of their replacements."""
        self.wait(0.0)
        self.listen()
        self.take_progress(self.ranks.ended(self.observer.members.values()))
        self.take_exits()

    def take_progress(self, pids: Set[int] | None = None) -> None:
        """Process reported steps, once all ranks have been found or are overdue. ``pids``: only the
        reports of these processes.
        """
        if self._missing and self.listener.overdue():
            self._miss_no_more(self._members)
        if self._missing:
            return
        before = (self.observer.generation, self.observer.committed)
        for progress in self.listener.take(
            pids, beyond=self.observer.last_said if self._gone else None
        ):
            reports = self.observer.reports
            self.observer.on_progress(self.roll.whose(progress), self.now_ns())
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
            asked = {"asked_ns": self.asked_ns} if self.asked_ns else {}
            if not asked and gone.exit_code == 0:
                # It may have been told to end: what it made of that comes before its end.
                self.observer.on_exit(gone.name, gone.exit_code, gone.signal, self.now_ns())
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
                self.observer.on_exit(gone.name, gone.exit_code, gone.signal, self.now_ns())

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
