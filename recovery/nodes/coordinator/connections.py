"""A coordinator's connections to the agents of its nodes: who is admitted, and which nodes are
present, missing or lost.

Only the wait itself blocks. A silent node is lost when the platform says so, or as
``recovery.nodes.coordinator.loss`` judges. An agent that was given up is fenced when it comes back.
"""

from __future__ import annotations

import math
import secrets
import signal as signals
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.detection.silence import PacedLook
from trainchaos.recovery.health.signs import Sign
from trainchaos.recovery.nodes.coordinator.listener import AgentListener
from trainchaos.recovery.nodes.coordinator.loss import Absence, FleetLimits, How, TakenAway, judge
from trainchaos.recovery.nodes.coordinator.node_state import (
    ClockMeasured,
    FleetReport,
    NodeChecked,
    NodeFound,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeLost,
    NodeState,
    NodeWarned,
)
from trainchaos.recovery.nodes.coordinator.remote_processes import RemoteProcesses
from trainchaos.recovery.nodes.coordinator.switchboard import Switchboard
from trainchaos.recovery.nodes.link import beat_rate, protocol
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.nodes.link.link import Link, Parcel
from trainchaos.recovery.process.output import say
from trainchaos.recovery.transport.stream import Closed, MessageError

ASLEEP_S = 1.0  # between two turns: a longer gap was our own, and no node counts as silent for it
AWAY_S = 2.0  # between two turns: agents may have hung up, and connect again
# after its own absence a coordinator knows within this time which connections had ended
NOTICED_S = 0.25
LOOK_S = 0.01  # while a connection is missing
MOST_SLEPT_S = 1.0
MAX_REFUSALS = 100
SHOWN_REFUSALS = 3


class Connections:
    """One connection per node, to agents that know ``token`` and dial ``host`` and ``port`` (0 for
    any). ``refused``: called with the address of a rejected agent and the reason; ``epoch``: higher
    than that of any coordinator before. Raises InfrastructureError when it cannot listen.
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
        self.states: dict[int, NodeState] = {}
        self._reports: list[FleetReport] = []
        self._processes = RemoteProcesses(self._reports, clock_ns)
        self._clock_ns, self._limits = clock_ns, limits
        self._late_ns = int(beat_rate.late_s(limits.beat_s) * 1e9)
        self._ping_ns = int(limits.ping_s * 1e9)
        self._boot = boot_id()
        self._gone: Callable[[int], str | None] = lambda node: None
        self._board = Switchboard()
        self._missing: set[int] = set()  # nodes that are not connected, or silent
        self.turned_ns = clock_ns()  # when it listened last
        self._away_ns = (0, 0)  # since when, until when
        self._alone = (-1, False)  # at what time, whether no node was heard then
        self._token, self._epoch, self._id = token, epoch, secrets.token_hex(8)
        self._log = refused or (lambda text: say(f"turned away: {text}", who="fleet"))
        self._refusals: deque[tuple[int | None, str]] = deque(maxlen=MAX_REFUSALS)
        self.address = (host, port)
        """That agents connect to."""
        self._listener: AgentListener | None = None
        self._listen()

    # ---- nodes

    def await_nodes(
        self,
        nodes: Collection[int],
        *,
        limit_s: float,
        gone: Callable[[int], str | None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait until an agent has connected for each node, or ``stopped``. ``gone``: returns why a
        node is known not to exist; it is called from now on, whenever a node is missing. Raises
        InfrastructureError, which names the missing nodes and the reasons.
        """
        self._gone = gone
        until_s = time.monotonic() + limit_s
        missing = list(nodes)
        lost: dict[int, str] = {}

        def look() -> None:
            missing[:] = [node for node in sorted(nodes) if not self._is_there(node)]
            lost.update({node: why for node in missing if (why := gone(node))})

        paced = PacedLook(time.monotonic)  # else thousands that come would each ask for all others
        while not stopped():
            paced.take(look)
            if not missing:
                return
            if lost or time.monotonic() >= until_s:
                waited_s = limit_s - max(0.0, until_s - time.monotonic())
                raise InfrastructureError(
                    f"not all nodes are there after {waited_s:.1f} s:"
                    f" {self._why_missing(missing, lost)}",
                    hint=(
                        f"an agent has to reach {self.address[0]}:{self.address[1]}; see what the"
                        " nodes' agents say"
                    ),
                )
            self.turn(LOOK_S)

    def nodes(self) -> Mapping[int, NodeInfo]:
        """Every node for which an agent has ever connected."""
        now_ns = self._clock_ns()
        return {
            node: state.info(now_ns, heard_ns=self.turned_ns)
            for node, state in sorted(self.states.items())
        }

    def present(self) -> list[NodeState]:
        """Nodes whose agent is connected."""
        return [state for state in self.states.values() if self._is_there(state.node)]

    def give_up(self, node: int, why: str) -> None:
        """Count a node as lost: its processes have ended, and what still runs there is killed when
        the node is heard again.
        """
        state = self.states[node]
        if state.lost:
            return
        state.lost = why
        if state.link is not None:
            _say_last(state.link, protocol.Fence())
            state.hang_up()
        taken_away = isinstance(why, TakenAway)
        self._reports.append(NodeLost(node=node, why=why, taken_away=taken_away))
        self._processes.lose(node)

    def away(self) -> None:
        """The coordinator is lost: it stops listening, and all connections end."""
        if self._listener is not None:
            self._board.listens(None)
            self._listener.close()
            self._listener = None
        self.flush_all()
        for state in self.states.values():
            state.hang_up()
            state.how = "reset"
            self._missing.add(state.node)
        self._board.close()

    def back(self) -> None:
        """Another coordinator has started, at the same address. Raises InfrastructureError."""
        self._epoch += 1
        self._listen()
        now_ns = self._clock_ns()
        self._away_ns = (0, now_ns)
        for state in self.states.values():
            state.left_ns = state.silent_ns = now_ns

    # ---- the loop

    def turn(self, timeout_s: float) -> None:
        """Serve the connections that need it once; waits up to ``timeout_s`` for something to
        come.
        """
        self.flush_all()
        ready, dialled = self._board.wait(min(timeout_s, self._due_s()))
        for state in ready:
            self._read(state)
        if dialled and self._listener is not None:
            for link, parcel in self._listener.enter():
                self._admit(link, parcel)
        now_ns = self._clock_ns()
        if (gap_ns := now_ns - self.turned_ns) > ASLEEP_S * 1e9:  # the gap was ours
            for state in self.states.values():
                state.silent_ns = now_ns
        if gap_ns > AWAY_S * 1e9:
            self._away_ns = (self.turned_ns, now_ns)
        self.turned_ns = now_ns
        for state in self._to_look_after(now_ns):
            self._look_after(state, now_ns)
        self.flush_all()

    def _to_look_after(self, now_ns: int) -> list[NodeState]:
        """Nodes that are missing or silent, at each turn; the others where something is due."""
        if self._listener is None:
            return []
        nodes = set(self._board.due(now_ns)) | self._missing
        self._missing = {
            node
            for node in nodes
            if not (state := self.states[node]).lost and self._misses(state, now_ns)
        }
        return [self.states[node] for node in sorted(nodes)]

    def _misses(self, state: NodeState, now_ns: int) -> bool:
        return state.link is None or now_ns - state.silent_ns > self._limits.silence_s * 1e9

    def _due_s(self) -> float:
        """How long nothing has to be done unless a message comes."""
        due_s = MOST_SLEPT_S
        if self._listener is None:
            return due_s
        if (next_ns := self._board.next_ns) is not None:
            due_s = min(due_s, (next_ns - self._clock_ns()) / 1e9)
        if any(self.states[node].link is None for node in self._missing):
            due_s = min(due_s, LOOK_S)
        return max(0.0, due_s)

    def _read(self, state: NodeState) -> None:
        try:
            for parcel in state.link.take() if state.link is not None else ():
                state.silent_ns, state.asked = self._clock_ns(), False
                if state.post.accept(parcel):
                    self._handle(state, parcel.frame)
        except MessageError as error:
            self._refuse(f"node {state.node} at {state.hello.address}: {error}", state.node)
            self._miss(state, "reset")
        except OSError as error:
            self._miss(state, "closed" if isinstance(error, Closed) else "reset")

    def _handle(self, state: NodeState, frame: Any) -> None:
        match frame:
            case protocol.Pong():
                told = state.pings >= beat_rate.FIRST_PINGS
                measured = state.answered(frame, self._clock_ns(), told=told)
                if measured is not None:
                    at = {"offset_ns": measured.offset_ns, "bound_ns": measured.bound_ns}
                    self._reports.append(ClockMeasured(node=state.node, **at))
            case protocol.Cleared():
                state.cleared = frame.left
            case protocol.Pressed():
                state.feels(frame, self._clock_ns(), self._boot)
            case protocol.Warned():
                self._reports.append(NodeWarned(node=state.node))
            case protocol.Checked(device=device, fit=fit, said=said):
                checked = NodeChecked(node=state.node, device=device, fit=fit, said=said)
                self._reports.append(checked)
            case protocol.Found():
                own = {"node": state.node, "rank": None}  # of no other node, and of no rank
                signs: tuple[Sign, ...] = (*frame.reports, *frame.alarms)
                for sign in signs:
                    found = NodeFound(node=state.node, sign=sign.model_copy(update=own))
                    self._reports.append(found)
            case _:
                self._processes.handle(state, frame)

    def _miss(self, state: NodeState, how: How) -> None:
        """The connection of a node has ended."""
        state.hang_up()
        state.how, state.left_ns = how, self._clock_ns()
        state.pace = self._processes.pace(state.node)
        self._missing.add(state.node)

    def _look_after(self, state: NodeState, now_ns: int) -> None:
        if state.lost:
            return
        if state.link is not None and now_ns >= state.ping_due_ns:
            state.pings += 1
            state.ping_due_ns = beat_rate.next_ping_ns(
                state.node, state.pings, now_ns, self._ping_ns
            )
            state.link.put(protocol.Ping(sent_ns=self._clock_ns()), got=state.post.received)
            self._board.stir(state)
        missed = self._misses(state, now_ns)
        if state.link is not None:
            silent_ns = state.silent_ns + int(self._limits.silence_s * 1e9) + 1
            at_ns = state.ping_due_ns if missed else min(state.ping_due_ns, silent_ns)
            self._board.look_at(state, at_ns)
        if missed and (why := self._gone(state.node)):
            self.give_up(state.node, why)
        elif state.post.full:
            self.give_up(state.node, "it takes no messages")
        elif missed:
            verdict, why = judge(self._absence(state, now_ns), self._limits)
            if verdict == "lost":
                self.give_up(state.node, why)
            elif verdict == "dying":  # most likely its agent was killed, and its processes with it
                for process in self._processes.of(state.node):
                    state.reported_dying = True
                    self._processes.warn_of(process)

    def _absence(self, state: NodeState, now_ns: int) -> Absence:
        since_ns, until_ns = self._away_ns
        ended = state.link is None
        if ended and now_ns - state.left_ns < self._late_ns:  # steps done before are still reported
            state.pace = self._processes.pace(state.node)
        if self._alone[0] != now_ns:  # found out once for all that are missing at that time
            self._alone = now_ns, not any(self.is_heard(other) for other in self.states.values())
        wanted_ns = max(state.wanted_ns, state.silent_ns) if state.wanted else now_ns
        return Absence(
            how=(state.how or "reset") if ended else "",
            ended_s=(now_ns - state.left_ns) / 1e9 if ended else 0.0,
            silent_s=(now_ns - state.silent_ns) / 1e9,
            data=self._processes.data(state) if ended else "unknown",
            trains=ended and self._processes.trains(state.node),
            wanted_s=(now_ns - wanted_ns) / 1e9,
            ours=since_ns < state.left_ns <= until_ns + NOTICED_S * 1e9,
            alone=self._alone[1],
            lease_s=state.hello.lease_s,
        )

    def is_heard(self, state: NodeState) -> bool:
        """Whether its agent is connected and sent something lately."""
        there = state.link is not None and not state.lost
        return there and self.silent_s(state) <= self._limits.silence_s

    def _is_there(self, node: int) -> bool:
        state = self.states.get(node)
        return state is not None and state.link is not None and not state.lost

    def reachable(self, node: int) -> NodeState:
        """The state of a node. Raises NodeGone when it is unknown or was given up."""
        state = self.states.get(node)
        if state is None:
            raise NodeGone(node, "its agent has never dialled")
        if state.lost:
            raise NodeGone(node, state.lost)
        return state

    def until(
        self,
        state: NodeState,
        done: Callable[[], bool],
        limit_s: float,
        what: str,
        *,
        silence_s: float = math.inf,
    ) -> None:
        """Take turns until a condition holds. Raises NodeGone when the node is lost meanwhile, or
        silent for too long.
        """
        until_s = time.monotonic() + limit_s
        while not done():
            self.turn(LOOK_S)  # before the judgement: this process may have slept for long
            silent_s = self.silent_s(state)
            if state.lost:
                raise NodeGone(state.node, state.lost)
            if silent_s > silence_s or time.monotonic() > until_s:
                raise NodeGone(state.node, f"it has not answered for {silent_s:.1f} s: {what}")

    def silent_s(self, state: NodeState) -> float:
        """For how long nothing came from the node."""
        return (self._clock_ns() - state.silent_ns) / 1e9

    def flush_all(self) -> None:
        """Send what waits, as far as possible."""
        for state in self._board.take_stirred():
            self.flush(state)

    def flush(self, state: NodeState) -> None:
        """Send what waits for one node."""
        if state.link is None:
            return
        state.post.pump(state.link)
        try:
            state.link.flush()
        except OSError as error:
            self._miss(state, "closed" if isinstance(error, BrokenPipeError) else "reset")
        else:
            more = bool(state.link.waiting or state.post.unsent)
            self._board.awaits_room(state, more=more)

    # ---- who is admitted

    def _listen(self) -> None:
        def stranger(why: str, node: int | None) -> None:
            if (node, why) not in self._refusals:  # once however often it dials
                self._refuse(why, node)

        try:
            self._listener = AgentListener(self.address, self._token, refused=stranger)
        except OSError as error:
            raise InfrastructureError(
                f"cannot listen for the nodes' agents at {self.address[0]}: {error.strerror}",
                hint="name an address of this machine that the nodes reach",
            ) from error
        self.address = self._listener.address
        self._board.listens(self._listener.fileno())

    def _refuse(self, why: str, node: int | None) -> None:
        """Note a rejected agent, and the reason. ``node``: the one that it claims to be."""
        self._refusals.append((node, why))
        self._log(why)

    def _why_missing(self, missing: Sequence[int], lost: Mapping[int, str]) -> str:
        """Why each of some nodes is not there, and who else was rejected. ``lost``: why some are
        known not to exist. Refusals of a node count until an agent is admitted there.
        """
        refusals = list(self._refusals)
        refused = {node: f"its agent was turned away: {why}" for node, why in refusals}
        what = "; ".join(
            f"node {n}: {lost.get(n) or refused.get(n) or 'its agent has not dialled'}"
            for n in missing
        )
        others = "; ".join([why for n, why in refusals if n not in missing][-SHOWN_REFUSALS:])
        return f"{what} (turned away: {others})" if others else what

    def _admit(self, link: Link, parcel: Parcel) -> None:
        hello: protocol.Hello = parcel.frame
        state = self.states.get(hello.node)
        known = state is not None and state.hello.incarnation == hello.incarnation
        why = ""
        if hello.epoch > self._epoch:
            why = f"it has obeyed a coordinator of epoch {hello.epoch}, this is {self._epoch}"
        elif state is not None and not known and self.is_heard(state):
            at = f"{state.hello.address} ({state.hello.host})"
            why = f"node {hello.node} has an agent already, at {at}"
        if why:
            refusal = f"an agent for node {hello.node} at {hello.address}: {why}"
            if (hello.node, refusal) not in self._refusals:
                self._refuse(refusal, hello.node)
            _say_last(link, protocol.Refused(why=why))
            link.close()
        elif known and state is not None:
            if not state.lost and state.reported_dying:
                why = "its connection was lost, and its processes counted as dead"
                self.give_up(state.node, why)
            self._again(state, link, parcel)
        elif hello.processes and not self._processes.inherited:  # of an unknown coordinator
            _say_last(link, protocol.Fence())
            link.close()
        else:
            if state is not None and not state.lost:
                self.give_up(state.node, "another agent has taken its place")
            self._join(link, hello)

    def _again(self, state: NodeState, link: Link, parcel: Parcel) -> None:
        """A known agent has connected again."""
        if state.lost:
            _say_last(link, protocol.Fence())
            link.close()
            return
        state.hang_up()
        state.post.accept(parcel)
        state.link, state.how, state.left_ns, state.silent_ns = link, "", 0, self._clock_ns()
        link.put(self._welcome(), got=state.post.received)
        state.post.reconnected()
        self._board.connected(state)

    def _join(self, link: Link, hello: protocol.Hello) -> None:
        now_ns, node = self._clock_ns(), hello.node
        state = NodeState(node=node, hello=hello, link=link, silent_ns=now_ns, ping_due_ns=now_ns)
        self.states[node] = state
        for refusal in [each for each in list(self._refusals) if each[0] == node]:
            self._refusals.remove(refusal)
        link.put(self._welcome())
        self._board.connected(state)
        ours = {process.name for process in self._processes.of(node)}
        for stranger in hello.processes.keys() - ours:
            state.post.add(protocol.Signal(process=stranger, signum=signals.SIGKILL))
        self._reports.append(NodeJoined(node=node, info=state.info(now_ns, heard_ns=now_ns)))

    def _welcome(self) -> protocol.Welcome:
        limits = self._limits
        return protocol.Welcome(
            epoch=self._epoch, coordinator=self._id, beat_s=limits.beat_s, ping_s=limits.ping_s
        )


def _say_last(link: Link, frame: protocol.Fence | protocol.Refused) -> None:
    """Send a connection's last message, as far as it takes it at once."""
    link.put(frame)
    with suppress(OSError):
        link.flush()
