"""A coordinator's connections to the agents of its nodes: who is there, who is missed, who is lost,
who is turned away.

Nothing blocks but the wait itself. A node that is not heard of is lost when the platform says so,
or as ``recovery.nodes.coordinator.loss`` judges. An agent that was given up is fenced when it comes
back.
"""

from __future__ import annotations

import math
import secrets
import select
import signal as signals
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from chaos.errors import InfrastructureError
from recovery.nodes.coordinator.berth import (
    Berth,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeLost,
    NodeNews,
    Remote,
)
from recovery.nodes.coordinator.listener import Door
from recovery.nodes.coordinator.loss import Absence, Data, FleetLimits, How, judge
from recovery.nodes.link import protocol
from recovery.nodes.link.clock import boot_id
from recovery.nodes.link.handshake import Refused
from recovery.nodes.link.link import Closed, Link, Parcel
from recovery.process.local import Dying, Exited, Said
from recovery.process.output import say

PING_EVERY_S = 1.0
FIRST_PINGS, FIRST_PING_EVERY_S = 8, 0.02
ASLEEP_S = 1.0  # between two turns: then nobody is held silent for it
# between two turns: agents, which hear of us every second, may have hung up, and dial again
AWAY_S = 2.0
NOTICED_S = 0.25  # after it was away a coordinator knows whose connection had ended
LOOK_S = 0.01  # while a connection is missed
MAX_REFUSALS = 100


FleetReport = Said | Dying | Exited | NodeNews


class Harbour:
    """Listens at ``host`` for agents that know ``token``. ``port``: 0 for any; ``refused``: told
    who was turned away and why; ``epoch``: higher than that of any coordinator before. ``gone``:
    asked about nodes that are missed. Raises InfrastructureError.
    """

    def __init__(
        self,
        *,
        token: bytes,
        host: str,
        port: int = 0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        limits: FleetLimits = FleetLimits(),
        refused: Callable[[str], None] | None = None,
        epoch: int = 1,
    ) -> None:
        self._token = token
        self._clock_ns = clock_ns
        self._limits = limits
        self._epoch = epoch
        self._id = secrets.token_hex(8)
        self._log = refused or _say
        self.refusals: deque[str] = deque(maxlen=MAX_REFUSALS)
        self._boot = boot_id()
        self._berths: dict[int, Berth] = {}
        self._gone: Callable[[int], str | None] = _unknown
        self._news: list[FleetReport] = []
        self._turned_ns = clock_ns()
        self._away_ns = (0, 0)  # since when, until when
        self._door: Door | None = None
        self.address: tuple[str, int] = (host, port)
        self._open()

    # ---- nodes

    def await_nodes(
        self,
        nodes: Collection[int],
        *,
        limit_s: float,
        gone: Callable[[int], str | None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until an agent is there for each, or ``stopped``. ``gone``: why a node is known not
        to be there; it is asked from now on, whenever one is missed. Raises InfrastructureError,
        which names who did not come and why.
        """
        self._gone = gone
        until_s = time.monotonic() + limit_s
        while (
            missing := [node for node in sorted(nodes) if not self._is_there(node)]
        ) and not stopped():
            lost = {node: why for node in missing if (why := gone(node))}
            if lost or time.monotonic() >= until_s:
                what = "; ".join(
                    f"node {n}: {lost.get(n) or 'its agent has not dialled'}" for n in missing
                )
                refused = (
                    f" (turned away: {'; '.join(list(self.refusals)[-3:])})"
                    if self.refusals
                    else ""
                )
                waited_s = limit_s - max(0.0, until_s - time.monotonic())
                raise InfrastructureError(
                    f"not all nodes are there after {waited_s:.1f} s: {what}{refused}",
                    hint=(
                        f"an agent has to reach {self.address[0]}:{self.address[1]}; see what the"
                        " nodes' agents say"
                    ),
                )
            self._turn(LOOK_S)

    def nodes(self) -> Mapping[int, NodeInfo]:
        """Every node that an agent ever came for."""
        now_ns = self._clock_ns()
        return {
            node: berth.info(now_ns, heard_ns=self._turned_ns)
            for node, berth in sorted(self._berths.items())
        }

    def traffic(self) -> Mapping[int, tuple[int, int]]:
        """Bytes sent to each node's agent and received from it."""
        return {node: berth.bytes_total() for node, berth in self._berths.items()}

    def give_up(self, node: int, why: str) -> None:
        """Count a node as lost: its processes have ended, and whatever still runs there is killed
        when it is heard of again.
        """
        berth = self._berths[node]
        if berth.lost:
            return
        berth.lost = why
        self._fence(berth)
        self._news.append(NodeLost(node=node, why=why))
        for process in self._living(node):
            self._end(process, exit_code=None, signum=signals.SIGKILL, time_ns=self._clock_ns())

    def away(self) -> None:
        """The coordinator is lost: nobody listens, and all connections end."""
        if self._door is not None:
            self._door.close()
            self._door = None
        self._flush_all()
        for berth in self._berths.values():
            berth.hang_up()
            berth.how = "reset"

    def back(self) -> None:
        """Another coordinator is there, at the same address. Raises InfrastructureError."""
        self._epoch += 1
        self._open()
        now_ns = self._clock_ns()
        self._away_ns = (0, now_ns)
        for berth in self._berths.values():
            berth.left_ns = berth.silent_ns = now_ns

    # ---- the loop

    def _turn(self, timeout_s: float) -> None:
        self._flush_all()
        poll = select.poll()
        by_fd = {b.link.fileno(): b for b in self._berths.values() if b.link is not None}
        for fd, berth in by_fd.items():
            busy = berth.link is not None and berth.link.waiting
            poll.register(fd, select.POLLIN | (select.POLLOUT if busy else 0))
        if self._door is not None:
            poll.register(self._door.fileno(), select.POLLIN)
        ready = [fd for fd, _ in poll.poll(min(timeout_s, self._due_s()) * 1000)]
        for fd in ready:
            if fd in by_fd:
                self._read(by_fd[fd])
        if self._door is not None and self._door.fileno() in ready:
            for link, parcel in self._door.enter():
                self._admit(link, parcel)
        now_ns = self._clock_ns()
        if (gap_ns := now_ns - self._turned_ns) > ASLEEP_S * 1e9:  # it was us
            for berth in self._berths.values():
                berth.silent_ns = now_ns
        if gap_ns > AWAY_S * 1e9:
            self._away_ns = (self._turned_ns, now_ns)
        self._turned_ns = now_ns
        for berth in list(self._berths.values()):
            self._look_after(berth, now_ns)
        self._flush_all()

    def _due_s(self) -> float:
        """How long nothing is to be done unless something comes."""
        now_ns = self._clock_ns()
        due_s = PING_EVERY_S
        for berth in self._berths.values():
            if berth.link is not None:
                due_s = min(due_s, (berth.ping_due_ns - now_ns) / 1e9)
            elif not berth.lost and self._door is not None:
                due_s = min(due_s, LOOK_S)
        return max(0.0, due_s)

    def _read(self, berth: Berth) -> None:
        try:
            parcels = berth.link.take() if berth.link is not None else []
            for parcel in parcels:
                berth.silent_ns, berth.asked = self._clock_ns(), False
                if berth.post.accept(parcel):
                    self._handle(berth, parcel.frame)
        except Refused as error:
            self._refuse(f"node {berth.node} at {berth.hello.address}: {error}")
            self._miss(berth, "reset")
        except OSError as error:
            self._miss(berth, "closed" if isinstance(error, Closed) else "reset")

    def _miss(self, berth: Berth, how: How) -> None:
        """Its connection has ended."""
        berth.hang_up()
        berth.how, berth.left_ns, berth.pace = how, self._clock_ns(), self._pace(berth)

    def _look_after(self, berth: Berth, now_ns: int) -> None:
        if berth.lost or self._door is None:
            return
        if berth.link is not None and now_ns >= berth.ping_due_ns:
            berth.pings += 1
            every_s = FIRST_PING_EVERY_S if berth.pings < FIRST_PINGS else PING_EVERY_S
            berth.ping_due_ns = now_ns + int(every_s * 1e9)
            berth.link.put(protocol.Ping(sent_ns=self._clock_ns()), got=berth.post.received)
        missed = berth.link is None or now_ns - berth.silent_ns > self._limits.silence_s * 1e9
        if missed and (why := self._gone(berth.node)):
            self.give_up(berth.node, why)
        elif berth.post.full:
            self.give_up(berth.node, "it takes no messages")
        elif missed:
            verdict, why = judge(self._absence(berth, now_ns), self._limits)
            if verdict == "lost":
                self.give_up(berth.node, why)
            elif verdict == "dying":
                self._warn(berth)

    def _absence(self, berth: Berth, now_ns: int) -> Absence:
        since_ns, until_ns = self._away_ns
        ended = berth.link is None
        wanted_ns = max(berth.wanted_ns, berth.silent_ns) if berth.wanted else now_ns
        return Absence(
            how=(berth.how or "reset") if ended else "",
            ended_s=(now_ns - berth.left_ns) / 1e9 if ended else 0.0,
            silent_s=(now_ns - berth.silent_ns) / 1e9,
            data=self._data(berth) if ended else "unknown",
            trains=ended and self._trains(berth),
            wanted_s=(now_ns - wanted_ns) / 1e9,
            ours=since_ns < berth.left_ns <= until_ns + NOTICED_S * 1e9,
            alone=not any(self._is_heard(other) for other in self._berths.values()),
            lease_s=berth.hello.lease_s,
        )

    def _is_heard(self, berth: Berth) -> bool:
        return (
            berth.link is not None
            and not berth.lost
            and self._silent_s(berth) <= self._limits.silence_s
        )

    def _warn(self, berth: Berth) -> None:
        """Most likely the agent was killed, and all its processes with it."""
        for process in self._living(berth.node):
            berth.told = True
            self._warn_of(process)

    # ---- agents

    def _open(self) -> None:
        try:
            self._door = Door(self.address, self._token, refused=self._refuse)
        except OSError as error:
            raise InfrastructureError(
                f"cannot listen for the nodes' agents at {self.address[0]}: {error.strerror}",
                hint="name an address of this machine that the nodes reach",
            ) from error
        self.address = self._door.address

    def _admit(self, link: Link, parcel: Parcel) -> None:
        hello: protocol.Hello = parcel.frame
        berth = self._berths.get(hello.node)
        known = berth is not None and berth.hello.incarnation == hello.incarnation
        if hello.epoch > self._epoch:
            self._turn_away(
                link,
                hello,
                f"it has obeyed a coordinator of epoch {hello.epoch}, this is {self._epoch}",
            )
        elif berth is not None and not known and self._is_heard(berth):
            self._turn_away(
                link, hello, f"node {hello.node} has an agent already, at {berth.hello.address}"
            )
        elif known and berth is not None:
            if not berth.lost and berth.told:
                self.give_up(
                    berth.node, "its connection was lost, and its processes counted as dead"
                )
            self._again(berth, link, parcel)
        elif hello.processes and not self._inherits(
            hello
        ):  # of a coordinator that nobody here knows anything of
            link.put(protocol.Fence())
            _last_words(link)
        else:
            if berth is not None and not berth.lost:
                self.give_up(berth.node, "another agent has taken its place")
            self._join(link, hello)

    def _again(self, berth: Berth, link: Link, parcel: Parcel) -> None:
        """An agent that we know has dialled again."""
        if berth.lost:
            link.put(protocol.Fence())
            _last_words(link)
            return
        berth.hang_up()
        berth.post.accept(parcel)
        berth.link, berth.how, berth.left_ns, berth.silent_ns = link, "", 0, self._clock_ns()
        link.put(self._welcome(), got=berth.post.received)
        berth.post.reconnected()

    def _join(self, link: Link, hello: protocol.Hello) -> None:
        now_ns = self._clock_ns()
        berth = Berth(node=hello.node, hello=hello, link=link, silent_ns=now_ns, ping_due_ns=now_ns)
        self._berths[hello.node] = berth
        link.put(self._welcome())
        for stranger in hello.processes.keys() - {
            process.name for process in self._living(hello.node)
        }:
            berth.post.add(protocol.Signal(process=stranger, signum=signals.SIGKILL))
        self._news.append(NodeJoined(node=hello.node, info=berth.info(now_ns, heard_ns=now_ns)))

    def _welcome(self) -> protocol.Welcome:
        return protocol.Welcome(epoch=self._epoch, coordinator=self._id)

    def _fence(self, berth: Berth) -> None:
        if berth.link is not None:
            berth.link.put(protocol.Fence())
            _last_words(berth.link)
            berth.hang_up()

    def _turn_away(self, link: Link, hello: protocol.Hello, why: str) -> None:
        self._refuse(f"an agent for node {hello.node} at {hello.address}: {why}")
        link.close()

    def _refuse(self, why: str) -> None:
        self.refusals.append(why)
        self._log(why)

    # ---- small

    def _is_there(self, node: int) -> bool:
        berth = self._berths.get(node)
        return berth is not None and berth.link is not None and not berth.lost

    def _reachable(self, node: int) -> Berth:
        berth = self._berths.get(node)
        if berth is None:
            raise NodeGone(node, "its agent has never dialled")
        if berth.lost:
            raise NodeGone(node, berth.lost)
        return berth

    def _until(
        self,
        berth: Berth,
        done: Callable[[], bool],
        limit_s: float,
        what: str,
        *,
        silence_s: float = math.inf,
    ) -> None:
        """Turn until something is done. Raises NodeGone when the node is lost meanwhile, or silent
        for too long.
        """
        until_s = time.monotonic() + limit_s
        while not done():
            self._turn(LOOK_S)  # before the judgement: nobody may have listened for long
            silent_s = self._silent_s(berth)
            if berth.lost:
                raise NodeGone(berth.node, berth.lost)
            if silent_s > silence_s or time.monotonic() > until_s:
                raise NodeGone(berth.node, f"it has not answered for {silent_s:.1f} s: {what}")

    def _silent_s(self, berth: Berth) -> float:
        return (self._clock_ns() - berth.silent_ns) / 1e9

    def _flush_all(self) -> None:
        for berth in self._berths.values():
            self._flush(berth)

    def _flush(self, berth: Berth) -> None:
        if berth.link is None:
            return
        berth.post.pump(berth.link)
        try:
            berth.link.flush()
        except OSError as error:
            self._miss(berth, "closed" if isinstance(error, BrokenPipeError) else "reset")

    @abstractmethod
    def _pace(self, berth: Berth) -> int:
        """How far ranks of other nodes have come."""

    @abstractmethod
    def _trains(self, berth: Berth) -> bool:
        """Whether it has ranks in the present generation."""

    @abstractmethod
    def _data(self, berth: Berth) -> Data:
        """What the ranks of other nodes have shown of its own since its connection ended."""

    @abstractmethod
    def _handle(self, berth: Berth, frame: Any) -> None:
        """A message came."""

    @abstractmethod
    def _inherits(self, hello: protocol.Hello) -> bool:
        """Whether an agent's processes, started for another coordinator, are ours now."""

    @abstractmethod
    def _living(self, node: int) -> Sequence[Remote]:
        """Processes of a node that were started and have not ended."""

    @abstractmethod
    def _warn_of(self, process: Remote) -> None:
        """It will have ended in a moment."""

    @abstractmethod
    def _end(
        self, process: Remote, *, exit_code: int | None, signum: int | None, time_ns: int
    ) -> None:
        """It has ended."""


def _last_words(link: Link) -> None:
    with suppress(OSError):
        link.flush()
    link.close()


def _unknown(node: int) -> str | None:
    return None


def _say(text: str) -> None:
    say(f"turned away: {text}", who="fleet")
