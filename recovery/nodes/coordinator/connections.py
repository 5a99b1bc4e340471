"""A coordinator's connections to the agents of its nodes: which are present, missing or lost.

Only the wait itself blocks. A silent node is lost when the platform says so, or as
``recovery.nodes.coordinator.loss`` judges. An agent that was given up is fenced when it comes back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.detection.silence import PacedLook
from trainchaos.recovery.nodes.coordinator import pings
from trainchaos.recovery.nodes.coordinator.admission import Admission
from trainchaos.recovery.nodes.coordinator.loss import Absence, FleetLimits, How, TakenAway, judge
from trainchaos.recovery.nodes.coordinator.node_events import told_of
from trainchaos.recovery.nodes.coordinator.node_state import (
    ClockMeasured,
    FleetReport,
    NodeGone,
    NodeInfo,
    NodeLost,
    NodeState,
)
from trainchaos.recovery.nodes.coordinator.remote_processes import RemoteProcesses
from trainchaos.recovery.nodes.coordinator.switchboard import Switchboard
from trainchaos.recovery.nodes.link import protocol
from trainchaos.recovery.nodes.link.beat_rate import late_s
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.transport.stream import Closed, MessageError

ASLEEP_S = 1.0  # between two turns: a longer gap was our own, and no node counts as silent for it
AWAY_S = 2.0  # between two turns: agents may have hung up, and connect again
# after its own absence a coordinator knows within this time which connections had ended
NOTICED_S = 0.25
LOOK_S = 0.01  # while a connection is missing


class Connections:
    """One connection per node. ``processes``: those of the nodes; ``reports``: what happens to
    nodes is appended there; for the rest see ``Fleet``. Raises InfrastructureError.
    """

    def __init__(
        self,
        processes: RemoteProcesses,
        reports: list[FleetReport],
        *,
        token: bytes,
        address: tuple[str, int],
        clock_ns: Callable[[], int],
        limits: FleetLimits,
        refused: Callable[[str], None] | None,
        epoch: int,
    ) -> None:
        self.states: dict[int, NodeState] = {}
        self._processes = processes
        self._reports = reports
        self._clock_ns = clock_ns
        self._limits, self._late_ns = limits, int(late_s(limits.beat_s) * 1e9)
        self._every_ns = int(limits.ping_s * 1e9)
        self._boot = boot_id()
        self._gone: Callable[[int], str | None] = _unknown
        self._board = Switchboard()
        self._missing: set[int] = set()  # nodes that are not connected, or silent
        self.turned_ns = clock_ns()  # when it listened last
        self._away_ns = (0, 0)  # since when, until when
        self._alone = (-1, False)  # at what time, whether no node was heard then
        self._admission = Admission(
            self.states,
            processes,
            reports,
            token=token,
            address=address,
            epoch=epoch,
            limits=limits,
            clock_ns=clock_ns,
            refused=refused,
            give_up=self.give_up,
            heard=self.is_heard,
            board=self._board,
        )

    @property
    def address(self) -> tuple[str, int]:
        """The address that agents connect to."""
        return self._admission.address

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
                    f" {self._admission.why_missing(missing, lost)}",
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

    def traffic(self) -> Mapping[int, tuple[int, int]]:
        """Bytes sent to each node's agent and received from it."""
        return {node: state.bytes_total() for node, state in self.states.items()}

    def give_up(self, node: int, why: str) -> None:
        """Count a node as lost: its processes have ended, and what still runs there is killed when
        the node is heard again.
        """
        state = self.states[node]
        if state.lost:
            return
        state.lost = why
        self._fence(state)
        taken_away = isinstance(why, TakenAway)
        self._reports.append(NodeLost(node=node, why=why, taken_away=taken_away))
        self._processes.lose(node)

    def away(self) -> None:
        """The coordinator is lost: it stops listening, and all connections end."""
        self._admission.close()
        self.flush_all()
        for state in self.states.values():
            state.hang_up()
            state.how = "reset"
            self._missing.add(state.node)
        self._board.close()

    def back(self) -> None:
        """Another coordinator has started, at the same address. Raises InfrastructureError."""
        self._admission.reopen()
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
        if dialled:
            self._admission.admit()
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
        if not self._admission.open:
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
        now_ns, due_s = self._clock_ns(), pings.EVERY_NS / 1e9
        if not self._admission.open:
            return due_s
        if (next_ns := self._board.next_ns) is not None:
            due_s = min(due_s, (next_ns - now_ns) / 1e9)
        if any(self.states[node].link is None for node in self._missing):
            due_s = min(due_s, LOOK_S)
        return max(0.0, due_s)

    def _read(self, state: NodeState) -> None:
        try:
            parcels = state.link.take() if state.link is not None else []
            for parcel in parcels:
                state.silent_ns, state.asked = self._clock_ns(), False
                if state.post.accept(parcel):
                    self._handle(state, parcel.frame)
        except MessageError as error:
            self._admission.note(f"node {state.node} at {state.hello.address}: {error}", state.node)
            self._miss(state, "reset")
        except OSError as error:
            self._miss(state, "closed" if isinstance(error, Closed) else "reset")

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
            state.ping_due_ns = pings.next_ns(state.node, state.pings, now_ns, self._every_ns)
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
            elif verdict == "dying":
                self._warn(state)

    def _absence(self, state: NodeState, now_ns: int) -> Absence:
        since_ns, until_ns = self._away_ns
        ended = state.link is None
        if ended and now_ns - state.left_ns < self._late_ns:  # steps done before are still reported
            state.pace = self._processes.pace(state.node)
        wanted_ns = max(state.wanted_ns, state.silent_ns) if state.wanted else now_ns
        return Absence(
            how=(state.how or "reset") if ended else "",
            ended_s=(now_ns - state.left_ns) / 1e9 if ended else 0.0,
            silent_s=(now_ns - state.silent_ns) / 1e9,
            data=self._processes.data(state) if ended else "unknown",
            trains=ended and self._processes.trains(state.node),
            wanted_s=(now_ns - wanted_ns) / 1e9,
            ours=since_ns < state.left_ns <= until_ns + NOTICED_S * 1e9,
            alone=self._is_alone(now_ns),
            lease_s=state.hello.lease_s,
        )

    def _is_alone(self, now_ns: int) -> bool:
        """Whether no node at all is heard, found out once for all that are missing at that time."""
        if self._alone[0] != now_ns:
            self._alone = now_ns, not any(self.is_heard(other) for other in self.states.values())
        return self._alone[1]

    def is_heard(self, state: NodeState) -> bool:
        """Whether its agent is connected and sent something lately."""
        return (
            state.link is not None
            and not state.lost
            and self.silent_s(state) <= self._limits.silence_s
        )

    def _warn(self, state: NodeState) -> None:
        """Report all processes of a node as dying: most likely its agent was killed, and they with
        it.
        """
        for process in self._processes.of(state.node):
            state.reported_dying = True
            self._processes.warn_of(process)

    def _handle(self, state: NodeState, frame: Any) -> None:
        match frame:
            case protocol.Pong():
                offset = state.answered(frame, self._clock_ns(), told=state.pings >= pings.FIRST)
                if offset is not None:
                    self._reports.append(
                        ClockMeasured(
                            node=state.node, offset_ns=offset.offset_ns, bound_ns=offset.bound_ns
                        )
                    )
            case protocol.Cleared():
                state.cleared = frame.left
            case protocol.Pressed():
                state.feels(frame, self._clock_ns(), self._boot)
            case protocol.Warned() | protocol.Found() | protocol.Checked():
                self._reports += told_of(state.node, frame)
            case _:
                self._processes.handle(state, frame)

    def _fence(self, state: NodeState) -> None:
        if state.link is not None:
            state.link.put(protocol.Fence())
            with suppress(OSError):
                state.link.flush()
            state.hang_up()

    # ---- helpers

    def present(self) -> list[NodeState]:
        """Nodes whose agent is connected."""
        return [state for state in self.states.values() if self._is_there(state.node)]

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


def _unknown(node: int) -> str | None:
    return None
