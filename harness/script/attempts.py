"""Starts the command of an arm, once or several times, and ends it with everything it started."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.script.processes.command import Command
from trainchaos.harness.script.processes.environment import PreparedCommand
from trainchaos.harness.script.processes.leftovers import CommandLeftovers
from trainchaos.harness.script.processes.ranks import Ranks
from trainchaos.harness.script.rank_watch import RankWatch
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.records import KillSession
from trainchaos.recovery.process.host import RecordEvent

TICK_S = 0.02
TERM_GRACE_S = 3.0  # from SIGTERM to the kill


@dataclass(kw_only=True)
class Attempts:
    """``command``: the running one, if any; ``number``: starts so far; ``arm``: its id, for the
    ledger; ``holds_launcher``: a fault hits what the command is started as.
    """

    prepared: PreparedCommand
    arm: str
    ledger: Ledger
    ranks: Ranks
    watch: RankWatch
    leftovers: CommandLeftovers
    record: RecordEvent
    now_ns: Callable[[], int]
    holds_launcher: bool

    def __post_init__(self) -> None:
        self.command: Command | None = None
        self.number = 0
        self._undo = ""  # ledger record of the running command
        self._left: list[dict[str, Any]] = []

    def start(self) -> str:
        """Start the command. Returns why it could not be started, or "". Raises InfrastructureError
        if its guard could not be started.
        """
        self.number += 1
        prepared = self.prepared
        self.command = command = Command.start(
            prepared.argv, directory=prepared.directory, env=prepared.env, output=prepared.output
        )
        self.watch.expect_ranks()
        if command.error:
            return command.error
        undo = KillSession.of(command.guard_pid, "guard of the command")
        self._undo = self.ledger.will(undo, arm=self.arm, process="command")
        self.ranks.register(command.fileno())
        self.record(
            Kind.COMMAND_STARTED,
            attempt=self.number,
            pid=command.pid,
            argv=list(prepared.argv),
        )
        if self.holds_launcher:
            name = f"launcher{self.number}"
            self.ranks.hold_launcher(name, command.pid)
            self.record(
                Kind.PROCESS_SPAWNED, process=name, pid=command.pid, role="launcher", mode="script"
            )
        return ""

    def note_left(self, command: Command) -> None:
        """Note the processes that outlive a command, before they are ended too."""
        ended = command.ended
        well = ended is not None and ended.well
        self._left = self.leftovers.processes(command.guard_pid, command.pid, well=well)

    def close(self, *, asked: bool) -> int:
        """End the command and all its descendants; returns how many processes could not be killed.
        ``asked``: the harness ends it.
        """
        command, self.command = self.command, None
        if command is None:
            return 0
        self.watch.wait(0.0)
        self.watch.take_exits()  # a process that has ended already was not asked to
        self.watch.asked_ns = self.now_ns()
        if command.pid:
            self._ask_to_end(command)
            self.ranks.unregister(command.fileno())
        left = command.close(self.prepared.mark)
        self._reap_ranks()
        self.watch.asked_ns = 0
        ended = command.ended
        if ended is not None:
            self.record(
                Kind.COMMAND_ENDED,
                attempt=self.number,
                exit_code=ended.exit_code,
                signal=ended.signal,
                asked=asked,
                killed=command.killed,
                left=self._left,
            )
        self._left = []
        if self._undo and not left:
            self.ledger.undone(self._undo, "ended")
        self._undo = ""
        return left

    def _ask_to_end(self, command: Command) -> None:
        deadline = time.monotonic() + TERM_GRACE_S
        if command.ended is None:
            command.terminate()
        while command.ended is None and time.monotonic() < deadline:
            self.watch.wait(TICK_S)
            self.watch.take_exits()
            command.look()

    def _reap_ranks(self) -> None:
        deadline = time.monotonic() + TERM_GRACE_S
        while self.ranks.living() and time.monotonic() < deadline:
            self.watch.wait(TICK_S)
            self.watch.take_exits()
