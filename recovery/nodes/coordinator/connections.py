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
from recovery.nodes.coordinator.listener import Listener
from recovery.nodes.coordinator.loss import Absence, Data, FleetLimits, How, judge
from recovery.nodes.coordinator.node_state import (
    NodeEvent,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeLost,
    NodeState,
    Remote,
)
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


FleetReport = Said | Dying | Exited | NodeEvent


class Connections:
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
        self._states: dict[int, NodeState] = {}
        self._gone: Callable[[int], str | None] = _unknown
        self._reports: list[FleetReport] = []
        self._turned_ns = clock_ns()
        self._away_ns = (0, 0)  # since when, until when
        self._listener: Listener | None = None
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
            node: state.info(now_ns, heard_ns=self._turned_ns)
            for node, state in sorted(self._states.items())
        }

    def traffic(self) -> Mapping[int, tuple[int, int]]:
        """Bytes sent to each node's agent and received from it."""
        return {node: state.bytes_total() for node, state in self._states.items()}

    def give_up(self, node: int, why: str) -> None:
        """Count a node as lost: its processes have ended, and whatever still runs there is killed
        when it is heard of again.
        """
        state = self._states[node]
        if state.lost:
            return
        state.lost = why
        self._fence(state)
        self._reports.append(NodeLost(node=node, why=why))
        for process in self._living(node):
            self._end(process, exit_code=None, signum=signals.SIGKILL, time_ns=self._clock_ns())

    def away(self) -> None:
        """The coordinator is lost: nobody listens, and all connections end."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._flush_all()
        for state in self._states.values():
            state.hang_up()
            state.how = "reset"

    def back(self) -> None:
        """Another coordinator is there, at the same address. Raises InfrastructureError."""
        self._epoch += 1
        self._open()
        now_ns = self._clock_ns()
        self._away_ns = (0, now_ns)
        for state in self._states.values():
            state.left_ns = state.silent_ns = now_ns

    # ---- the loop

    def _turn(self, timeout_s: float) -> None:
        self._flush_all()
        poll = select.poll()
        by_fd = {b.link.fileno(): b for b in self._states.values() if b.link is not None}
        for fd, state in by_fd.items():
            busy = state.link is not None and state.link.waiting
            poll.register(fd, select.POLLIN | (select.POLLOUT if busy else 0))
        if self._listener is not None:
            poll.register(self._listener.fileno(), select.POLLIN)
        ready = [fd for fd, _ in poll.poll(min(timeout_s, self._due_s()) * 1000)]
        for fd in ready:
            if fd in by_fd:
                self._read(by_fd[fd])
        if self._listener is not None and self._listener.fileno() in ready:
            for link, parcel in self._listener.enter():
                self._admit(link, parcel)
        now_ns = self._clock_ns()
        if (gap_ns := now_ns - self._turned_ns) > ASLEEP_S * 1e9:  # it was us
            for state in self._states.values():
                state.silent_ns = now_ns
        if gap_ns > AWAY_S * 1e9:
            self._away_ns = (self._turned_ns, now_ns)
        self._turned_ns = now_ns
        for state in list(self._states.values()):
            self._look_after(state, now_ns)
        self._flush_all()

    def _due_s(self) -> float:
        """How long nothing is to be done unless something comes."""
        now_ns = self._clock_ns()
        due_s = PING_EVERY_S
        for state in self._states.values():
            if state.link is not None:
                due_s = min(due_s, (state.ping_due_ns - now_ns) / 1e9)
            elif not state.lost and self._listener is not None:
                due_s = min(due_s, LOOK_S)
        return max(0.0, due_s)

    def _read(self, state: NodeState) -> None:
        try:
            parcels = state.link.take() if state.link is not None else []
            for parcel in parcels:
                state.silent_ns, state.asked = self._clock_ns(), False
                if state.post.accept(parcel):
                    self._handle(state, parcel.frame)
        except Refused as error:
            self._refuse(f"node {state.node} at {state.hello.address}: {error}")
            self._miss(state, "reset")
        except OSError as error:
            self._miss(state, "closed" if isinstance(error, Closed) else "reset")

    def _miss(self, state: NodeState, how: How) -> None:
        """Its connection has ended."""
        state.hang_up()
        state.how, state.left_ns, state.pace = how, self._clock_ns(), self._pace(state)

    def _look_after(self, state: NodeState, now_ns: int) -> None:
        if state.lost or self._listener is None:
            return
        if state.link is not None and now_ns >= state.ping_due_ns:
            state.pings += 1
            every_s = FIRST_PING_EVERY_S if state.pings < FIRST_PINGS else PING_EVERY_S
            state.ping_due_ns = now_ns + int(every_s * 1e9)
            state.link.put(protocol.Ping(sent_ns=self._clock_ns()), got=state.post.received)
        missed = state.link is None or now_ns - state.silent_ns > self._limits.silence_s * 1e9
        if missed and (why := self._gone(state.node)):
            self.give_up(state.node, why)
        elif state.post.full:
            self.give_up(state.node, "it takes no messages")
        elif missed:
            verdict, why = judge(self._absence(state, now_ns), self._limits)
            if verdict == "lost":
                self.give_up(state.node, why)
            elif verdict == "dying":
                self._warn(state)

    def _absence(self, state: NodeState, now_ns: int) -> Absence:
        since_ns, until_ns = self._away_ns
        ended = state.link is None
        wanted_ns = max(state.wanted_ns, state.silent_ns) if state.wanted else now_ns
        return Absence(
            how=(state.how or "reset") if ended else "",
            ended_s=(now_ns - state.left_ns) / 1e9 if ended else 0.0,
            silent_s=(now_ns - state.silent_ns) / 1e9,
            data=self._data(state) if ended else "unknown",
            trains=ended and self._trains(state),
            wanted_s=(now_ns - wanted_ns) / 1e9,
            ours=since_ns < state.left_ns <= until_ns + NOTICED_S * 1e9,
            alone=not any(self._is_heard(other) for other in self._states.values()),
            lease_s=state.hello.lease_s,
        )

    def _is_heard(self, state: NodeState) -> bool:
        return (
            state.link is not None
            and not state.lost
            and self._silent_s(state) <= self._limits.silence_s
        )

    def _warn(self, state: NodeState) -> None:
        """Most likely the agent was killed, and all its processes with it."""
        for process in self._living(state.node):
            state.told = True
            self._warn_of(process)

    # ---- agents

    def _open(self) -> None:
        try:
            self._listener = Listener(self.address, self._token, refused=self._refuse)
        except OSError as error:
            raise InfrastructureError(
                f"cannot listen for the nodes' agents at {self.address[0]}: {error.strerror}",
                hint="name an address of this machine that the nodes reach",
            ) from error
        self.address = self._listener.address

    def _admit(self, link: Link, parcel: Parcel) -> None:
        hello: protocol.Hello = parcel.frame
        state = self._states.get(hello.node)
        known = state is not None and state.hello.incarnation == hello.incarnation
        if hello.epoch > self._epoch:
            self._turn_away(
                link,
                hello,
                f"it has obeyed a coordinator of epoch {hello.epoch}, this is {self._epoch}",
            )
        elif state is not None and not known and self._is_heard(state):
            self._turn_away(
                link, hello, f"node {hello.node} has an agent already, at {state.hello.address}"
            )
        elif known and state is not None:
            if not state.lost and state.told:
                self.give_up(
                    state.node, "its connection was lost, and its processes counted as dead"
                )
            self._again(state, link, parcel)
        elif hello.processes and not self._inherits(
            hello
        ):  # of a coordinator that nobody here knows anything of
            link.put(protocol.Fence())
            _last_words(link)
        else:
            if state is not None and not state.lost:
                self.give_up(state.node, "another agent has taken its place")
            self._join(link, hello)

    def _again(self, state: NodeState, link: Link, parcel: Parcel) -> None:
        """An agent that we know has dialled again."""
        if state.lost:
            link.put(protocol.Fence())
            _last_words(link)
            return
        state.hang_up()
        state.post.accept(parcel)
        state.link, state.how, state.left_ns, state.silent_ns = link, "", 0, self._clock_ns()
        link.put(self._welcome(), got=state.post.received)
        state.post.reconnected()

    def _join(self, link: Link, hello: protocol.Hello) -> None:
        now_ns = self._clock_ns()
        state = NodeState(
            node=hello.node, hello=hello, link=link, silent_ns=now_ns, ping_due_ns=now_ns
        )
        self._states[hello.node] = state
        link.put(self._welcome())
        for stranger in hello.processes.keys() - {
            process.name for process in self._living(hello.node)
        }:
            state.post.add(protocol.Signal(process=stranger, signum=signals.SIGKILL))
        self._reports.append(NodeJoined(node=hello.node, info=state.info(now_ns, heard_ns=now_ns)))

    def _welcome(self) -> protocol.Welcome:
        return protocol.Welcome(epoch=self._epoch, coordinator=self._id)

    def _fence(self, state: NodeState) -> None:
        if state.link is not None:
            state.link.put(protocol.Fence())
            _last_words(state.link)
            state.hang_up()

    def _turn_away(self, link: Link, hello: protocol.Hello, why: str) -> None:
        self._refuse(f"an agent for node {hello.node} at {hello.address}: {why}")
        link.close()

    def _refuse(self, why: str) -> None:
        self.refusals.append(why)
        self._log(why)

    # ---- small

    def _is_there(self, node: int) -> bool:
        state = self._states.get(node)
        return state is not None and state.link is not None and not state.lost

    def _reachable(self, node: int) -> NodeState:
        state = self._states.get(node)
        if state is None:
            raise NodeGone(node, "its agent has never dialled")
        if state.lost:
            raise NodeGone(node, state.lost)
        return state

    def _until(
        self,
        state: NodeState,
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
            silent_s = self._silent_s(state)
            if state.lost:
                raise NodeGone(state.node, state.lost)
            if silent_s > silence_s or time.monotonic() > until_s:
                raise NodeGone(state.node, f"it has not answered for {silent_s:.1f} s: {what}")

    def _silent_s(self, state: NodeState) -> float:
        return (self._clock_ns() - state.silent_ns) / 1e9

    def _flush_all(self) -> None:
        for state in self._states.values():
            self._flush(state)

    def _flush(self, state: NodeState) -> None:
        if state.link is None:
            return
        state.post.pump(state.link)
        try:
            state.link.flush()
        except OSError as error:
            self._miss(state, "closed" if isinstance(error, BrokenPipeError) else "reset")

    @abstractmethod
    def _pace(self, state: NodeState) -> int:
        """How far ranks of other nodes have come."""

    @abstractmethod
    def _trains(self, state: NodeState) -> bool:
        """Whether it has ranks in the present generation."""

    @abstractmethod
    def _data(self, state: NodeState) -> Data:
        """What the ranks of other nodes have shown of its own since its connection ended."""

    @abstractmethod
    def _handle(self, state: NodeState, frame: Any) -> None:
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
