"""The processes of a supervised job: where each runs, and where the next one is started."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trainchaos.chaos.errors import InfrastructureError, NoPlaceLeft
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.cli.process_host import (
    LeastTaken,
    ProcessHost,
    ProcessPlacement,
    Remote,
)
from trainchaos.recovery.cli.takeover_log import TakeoverLog
from trainchaos.recovery.health.reputation import NOT_OF_A_PLACE, Reputation
from trainchaos.recovery.process.logroom import LogRoom
from trainchaos.recovery.rank.script import ScriptConfig

Configure = Callable[[str, ProcessPlacement], ScriptConfig]
FEW_ASKED = 64
"""Processes asked for at a time: fewer than ``takeover_log.UNWRITTEN``, as all of them may be
started without being in the log when the supervisor is lost.
"""
MOST_ASKED = 8192
"""The same where the log says which names they may have. Each is answered in the turn after next at
best, and a turn serves all nodes: with few asked for, thousands of nodes start their ranks slowly.
"""
ORDER_S = 0.5
"""For which an order of spots is used again, or for ten times as long as it took: nodes fall
silent, and devices fail.
"""


@dataclass(frozen=True, kw_only=True)
class StartedProcess:
    """A process that was just started."""

    name: str
    pid: int
    spot: ProcessPlacement


class JobProcesses:
    """Processes that live, or whose exit is not recorded yet: ``pids``. ``takeover``: log of the
    supervisor whose job is taken over; ``write``: logs an event of the supervisor.
    """

    def __init__(
        self,
        host: ProcessHost,
        log_room: LogRoom,
        takeover: TakeoverLog | None,
        now_s: Callable[[], float],
        write: Callable[..., object],
    ) -> None:
        self._host = host
        self._log_room = log_room
        self._now_s = now_s
        self._write = write
        self._reserved = 0  # what processes may be called is in the log, up to this number
        left = takeover.processes if takeover is not None else {}
        self.pids = {name: entry.pid for name, entry in left.items() if not entry.gone}
        self._spots = {name: (left[name].node, left[name].device) for name in self.pids}
        self.reputation = Reputation(now_s)
        for left_by, cause, time_s in takeover.failures if takeover is not None else ():
            if cause not in NOT_OF_A_PLACE:
                self.reputation.failed((left_by.node, left_by.device), time_s)
        for left_by in takeover.replaced_for_values if takeover is not None else ():
            self.reputation.distrust((left_by.node, left_by.device))
        self._count = takeover.names if takeover is not None else 0
        self._ordered: LeastTaken | None = None  # until then, or something changes
        self._ordered_until_s = 0.0
        self._expected: dict[tuple[str, str], int] = {}  # starts to come, by role and mode
        self._asked: deque[tuple[str, ProcessPlacement]] = deque()
        self._why = ""
        self._failed: set[int] = set()  # nodes, since the search for a spot began
        self._remote = host if isinstance(host, Remote) else None

    def start(
        self,
        role: str,
        mode: str,
        config: Configure,
        *,
        stopped: Callable[[], bool],
    ) -> StartedProcess:
        """Start a process under the next free name: ``w<n>``, or ``s<n>`` for one that starts as
        spare.

        Tries node after node, and again while any may come back, unless the job is ``stopped``.
        Each try uses up a name: a process that seemed not to start may exist, and begin late.
        Raises NoPlaceLeft when none may come back, and InfrastructureError when it is stopped.
        """
        kind = "s" if role == "spare" else "w"
        ahead = max(0, self._expected.pop((role, mode), 0) - 1)
        self._expected = {(role, mode): ahead} if ahead else {}
        while True:
            self._why = "no node is left"
            if self._failed:
                self._failed, self._ordered = set(), None
            while (asked := self._ask(kind, mode, config, 1 + ahead)) is not None:
                name, spot = asked
                try:
                    pid = self._answer(name, spot, config, mode)
                except ConnectionError as error:
                    self._gone(spot, str(error))
                else:
                    self.pids[name], self._spots[name] = pid, (spot.node, spot.device)
                    return StartedProcess(name=name, pid=pid, spot=spot)
            if stopped() or not self._host.may_return():
                self._expected = {}  # the calls that were to follow do not
                lacking = InfrastructureError if stopped() else NoPlaceLeft
                raise lacking(
                    f"cannot start a process: {self._why}", hint="see what the nodes' agents say"
                )

    def expect(self, role: str, mode: str, count: int) -> None:
        """So many calls of ``start`` follow at once. Where processes are started by agents, up to
        MOST_ASKED of them are asked for at a time: a job would else wait once for each rank.
        """
        self._expected = {(role, mode): count}
        if self._remote is not None and count > FEW_ASKED:
            self._reserved = self._count + count
            self._write(Kind.NAMES_RESERVED, below=self._reserved)

    def _ask(
        self, kind: str, mode: str, config: Configure, count: int
    ) -> tuple[str, ProcessPlacement] | None:
        """The name and the spot of the next process; it and the next ones, ``count`` in all, are
        asked for where the host is remote. None: there is no spot.
        """
        while len(self._asked) < min(count, self._most_asked()):
            order = self._order()
            if (spot := order.best()) is None:
                break
            name = f"{kind}{self._count}"
            self._count += 1
            self._log_room.begins(name)
            if self._remote is not None:
                try:
                    self._remote.ask_for(name, spot, config(name, spot), mode)
                except ConnectionError as error:
                    self._gone(spot, str(error))
                    continue
            order.took(spot)
            self._asked.append((name, spot))
        return self._asked.popleft() if self._asked else None

    def _most_asked(self) -> int:
        """How many processes may be asked for at a time, the next one included."""
        if self._remote is None:
            return 1
        return MOST_ASKED if self._count < self._reserved else FEW_ASKED

    def _answer(self, name: str, spot: ProcessPlacement, config: Configure, mode: str) -> int:
        """The pid of a process that was asked for, or is started now."""
        if self._remote is not None:
            return self._remote.started(name, spot)
        return self._host.start(name, spot, config(name, spot), mode)

    def _gone(self, spot: ProcessPlacement, why: str) -> None:
        """The node of a spot takes no process now."""
        self._why = why
        self._failed.add(spot.node)
        if self._ordered is not None:
            self._ordered.close(spot.node)

    def _order(self) -> LeastTaken:
        """The spots, least taken first: of the start before, if that was a moment ago and nothing
        has changed since.
        """
        now_s = self._now_s()
        if self._ordered is None or now_s >= self._ordered_until_s:
            left = [spot for spot in self._host.spots() if spot.node not in self._failed]
            taken = [self._spots[other] for other in self.pids]
            taken += [(spot.node, spot.device) for _, spot in self._asked]
            self._ordered = LeastTaken(left, taken, self.reputation.avoids)
            # a small job, for which it costs nothing, orders them anew for each start, and a large
            # one is not to spend its time on it
            took_s = self._now_s() - now_s
            good_s = min(50 * took_s, max(ORDER_S, 10 * took_s))
            self._ordered_until_s = now_s + took_s + good_s
        return self._ordered

    def failed(self, name: str | None) -> None:
        """A process failed at its spot, which is avoided for a while."""
        if name is not None and name in self._spots:
            self.reputation.failed(self._spots[name])
            self._ordered = None

    def living(self) -> list[str]:
        """Processes whose exit is not recorded."""
        return list(self.pids)

    def gone(self, process: str) -> bool:
        """Whether its exit is recorded."""
        return process not in self.pids

    def spot_of(self, name: str) -> tuple[int, str] | None:
        """Node and device of a process whose exit is not answered yet."""
        return self._spots.get(name)

    def distrust(self, name: str) -> None:
        """A process is replaced for its values."""
        if name in self._spots:
            self.reputation.distrust(self._spots[name])

    def spots_in_use(self) -> set[tuple[int, str]]:
        """Node and device of each process whose exit is not answered yet."""
        return set(self._spots.values())

    def exited(self, name: str) -> None:
        """Its exit was recorded: its place is free."""
        del self.pids[name]
        self._ordered = None

    def forget(self, name: str) -> None:
        """Its exit was answered as well."""
        self._spots.pop(name, None)
