"""The processes of a supervised script: where each runs, and where the next one is started."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

from trainchaos.chaos.errors import InfrastructureError, NoPlaceLeft
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.cli.avoided_places import AvoidedPlaces
from trainchaos.recovery.cli.hosts import ScriptHost
from trainchaos.recovery.cli.takeover_log import TakeoverLog
from trainchaos.recovery.health.checks import Spot
from trainchaos.recovery.health.reputation import NOT_OF_A_PLACE
from trainchaos.recovery.process.host import Exited
from trainchaos.recovery.process.logroom import LogRoom
from trainchaos.recovery.supervise.supervisor import Roster, StartedProcess

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


@runtime_checkable
class Remote(Protocol):
    """A host that takes a while to start a process, and can start several at a time: ``spawn`` in
    two parts.
    """

    def ask(self, name: str, role: str, mode: str, device: str, node: int) -> None:
        """Have a process started. Raises as ``spawn``."""

    def started(self, name: str, node: int) -> int:
        """Its pid, once it is started. Raises as ``spawn``."""


Avoids = Callable[[Spot], bool]


class LeastTaken:
    """Spots in the order in which to try them for one process after the other, each as soon as the
    one before is started; ``taken``: that of each living process. A spot may occur several times,
    for as many processes. ``avoids``: whether processes kept failing at a spot; one that stays
    empty for that reason is taken last, unless a GPU would have to be shared instead.

    To start one process costs the logarithm of the number of spots; it would cost all of them to
    order them anew, and a job of many nodes that many times as much.
    """

    def __init__(
        self,
        spots: Sequence[Spot],
        taken: Iterable[Spot],
        avoids: Avoids = lambda _: False,
    ) -> None:
        self._avoids = avoids
        self._held = Counter(taken)
        self._there = Counter(spots)
        self._left = [(self._rating(spot), turn, spot) for turn, spot in enumerate(spots)]
        heapq.heapify(self._left)
        self._closed: set[int] = set()

    def best(self) -> Spot | None:
        """The spot to try next; None: there is none."""
        while self._left:
            rating, turn, spot = self._left[0]
            if spot[0] in self._closed:
                heapq.heappop(self._left)
                continue
            now = self._rating(spot)
            if now <= rating:
                return spot
            heapq.heapreplace(self._left, (now, turn, spot))
        return None

    def took(self, spot: Spot) -> None:
        """A process was started there."""
        self._held[spot] += 1

    def close(self, node: int) -> None:
        """A node takes no process now: its spots are not tried again."""
        self._closed.add(node)

    def _rating(self, spot: Spot) -> tuple[int, bool, int]:
        crowd = self._held[spot] // self._there[spot]
        return crowd if spot[1].startswith("cuda") else 0, self._avoids(spot), crowd


class ScriptRoster(Roster):
    """``takeover``: log of the supervisor whose job is taken over; ``avoided``: places that are
    tainted; ``write``: logs an event; ``stopped``: whether the job is to end.
    """

    def __init__(
        self,
        host: ScriptHost,
        log_room: LogRoom,
        takeover: TakeoverLog | None,
        avoided: AvoidedPlaces,
        write: Callable[..., object],
        stopped: Callable[[], bool],
    ) -> None:
        super().__init__(lambda: host.now_ns() / 1e9)
        self._host, self._log_room, self._avoided = host, log_room, avoided
        self._write, self._stopped = write, stopped
        self._reserved = 0  # what processes may be called is in the log, up to this number
        left = takeover.processes if takeover is not None else {}
        self.pids = {name: entry.pid for name, entry in left.items() if not entry.gone}
        self._spots = {name: (left[name].node, left[name].device) for name in self.pids}
        for left_by, cause, time_s in takeover.failures if takeover is not None else ():
            if cause not in NOT_OF_A_PLACE:
                self.reputation.failed((left_by.node, left_by.device), time_s)
        for left_by in takeover.replaced_for_values if takeover is not None else ():
            self.reputation.distrust((left_by.node, left_by.device))
        self._count = takeover.names if takeover is not None else 0
        self._ordered: LeastTaken | None = None  # until then, or something changes
        self._ordered_until_s = 0.0
        self._expected: dict[tuple[str, str], int] = {}  # starts to come, by role and mode
        self._asked: deque[tuple[str, Spot]] = deque()
        self._why = ""
        self._failed: set[int] = set()  # nodes, since the search for a spot began
        self._remote = host if isinstance(host, Remote) else None

    def start(self, role: str, mode: str) -> StartedProcess:
        """Tries node after node, and again while any may come back, unless the job is to end.
        Each try uses up a name: a process that seemed not to start may exist, and begin late.
        Raises NoPlaceLeft when none may come back, and InfrastructureError when the job is to end.
        """
        ahead = max(0, self._expected.pop((role, mode), 0) - 1)
        self._expected = {(role, mode): ahead} if ahead else {}
        while True:
            self._why = "no node is left"
            if self._failed:
                self._failed, self._ordered = set(), None
            while (asked := self._ask(role, mode, 1 + ahead)) is not None:
                name, (node, device) = asked
                try:
                    pid = (
                        self._remote.started(name, node)
                        if self._remote is not None
                        else self._host.spawn(name, role, mode, device, node)
                    )
                except ConnectionError as error:
                    self._gone(node, str(error))
                else:
                    return self.started(name, pid, (node, device))
            stopped = self._stopped()
            if stopped or not self._host.may_return():
                self._expected = {}  # the calls that were to follow do not
                raise (InfrastructureError if stopped else NoPlaceLeft)(
                    f"cannot start a process: {self._why}", hint="see what the nodes' agents say"
                )

    def expect(self, role: str, mode: str, count: int) -> None:
        """Where processes are started by agents, up to MOST_ASKED of them are asked for at a time:
        a job would else wait once for each rank.
        """
        self._expected = {(role, mode): count}
        if self._remote is not None and count > FEW_ASKED:
            self._reserved = self._count + count
            self._write(Kind.NAMES_RESERVED, below=self._reserved)

    def _ask(self, role: str, mode: str, count: int) -> tuple[str, Spot] | None:
        """The name and the spot of the next process; it and the next ones, ``count`` in all, are
        asked for where the host is remote. None: there is no spot.
        """
        while len(self._asked) < min(count, self._most_asked()):
            order = self._order()
            if (spot := order.best()) is None:
                break
            name = f"{'s' if role == 'spare' else 'w'}{self._count}"
            self._count += 1
            self._log_room.begins(name)
            if self._remote is not None:
                try:
                    self._remote.ask(name, role, mode, device=spot[1], node=spot[0])
                except ConnectionError as error:
                    self._gone(spot[0], str(error))
                    continue
            order.took(spot)
            self._asked.append((name, spot))
        return self._asked.popleft() if self._asked else None

    def _most_asked(self) -> int:
        """How many processes may be asked for at a time, the next one included."""
        if self._remote is None:
            return 1
        return MOST_ASKED if self._count < self._reserved else FEW_ASKED

    def _gone(self, node: int, why: str) -> None:
        """A node takes no process now."""
        self._why = why
        self._failed.add(node)
        if self._ordered is not None:
            self._ordered.close(node)

    def _order(self) -> LeastTaken:
        """The spots, least taken first: of the start before, if that was a moment ago and nothing
        has changed since.
        """
        now_s = self._now_s()
        if self._ordered is None or now_s >= self._ordered_until_s:
            host = self._host
            spots = [(node, device) for node in host.usable() for device in host.places_on(node)]
            left = [spot for spot in self._avoided.left(spots) if spot[0] not in self._failed]
            taken = [self._spots[other] for other in self.pids]
            taken += [spot for _, spot in self._asked]
            self._ordered = LeastTaken(left, taken, self.reputation.avoids)
            # a small job, for which it costs nothing, orders them anew for each start, and a large
            # one is not to spend its time on it
            took_s = self._now_s() - now_s
            good_s = min(50 * took_s, max(ORDER_S, 10 * took_s))
            self._ordered_until_s = now_s + took_s + good_s
        return self._ordered

    def _now_s(self) -> float:
        return self._host.now_ns() / 1e9

    def failed(self, name: str) -> None:
        """A process failed at its spot, which is avoided for a while."""
        if name in self._spots:
            self.reputation.failed(self._spots[name])
            self._ordered = None

    def exited(self, report: Exited) -> int:
        self._ordered = None
        return super().exited(report)
