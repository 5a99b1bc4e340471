"""Admits agents or rejects them: an agent that was given up is fenced when it comes back."""

from __future__ import annotations

import secrets
import signal as signals
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.nodes.coordinator.listener import AgentListener
from trainchaos.recovery.nodes.coordinator.loss import FleetLimits
from trainchaos.recovery.nodes.coordinator.node_state import FleetReport, NodeJoined, NodeState
from trainchaos.recovery.nodes.coordinator.remote_processes import RemoteProcesses
from trainchaos.recovery.nodes.coordinator.switchboard import Switchboard
from trainchaos.recovery.nodes.link import protocol
from trainchaos.recovery.nodes.link.link import Link, Parcel
from trainchaos.recovery.process.output import say

MAX_REFUSALS = 100
SHOWN_REFUSALS = 3


class Admission:
    """Listens at ``address`` (port 0 for any) for agents that know ``token``, and adds their nodes
    to ``states``. ``refused``: called with the address of a rejected agent and the reason;
    ``give_up``: counts a node as lost; ``heard``: whether a message of its agent came lately;
    ``board``: is told of connections; ``limits``: of which agents are told some. Raises
    InfrastructureError when it cannot listen.
    """

    def __init__(
        self,
        states: dict[int, NodeState],
        processes: RemoteProcesses,
        reports: list[FleetReport],
        *,
        token: bytes,
        address: tuple[str, int],
        epoch: int,
        limits: FleetLimits,
        clock_ns: Callable[[], int],
        refused: Callable[[str], None] | None,
        give_up: Callable[[int, str], None],
        heard: Callable[[NodeState], bool],
        board: Switchboard,
    ) -> None:
        self._states = states
        self._processes = processes
        self._reports = reports
        self._token = token
        self.address = address
        self._epoch = epoch
        self._limits = limits
        self._clock_ns = clock_ns
        self._log = refused or _say
        self._give_up = give_up
        self._heard = heard
        self._board = board
        self._id = secrets.token_hex(8)
        self._refusals: deque[tuple[int | None, str]] = deque(maxlen=MAX_REFUSALS)
        self._listener: AgentListener | None = None
        self._open()

    @property
    def open(self) -> bool:
        """Whether agents can connect."""
        return self._listener is not None

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._board.listens(None)
            self._listener.close()
            self._listener = None

    def reopen(self) -> None:
        """Listen at the same address again, as the next coordinator. Raises InfrastructureError."""
        self._epoch += 1
        self._open()

    def admit(self) -> None:
        """Admit or reject all agents that wait."""
        for link, parcel in self._listener.enter() if self._listener is not None else ():
            self._admit(link, parcel)

    def refuse(self, why: str, node: int | None = None) -> None:
        """Note a rejected agent, and the reason, once however often it dials. ``node``: the one
        that it claims to be.
        """
        if (node, why) not in self._refusals:
            self.note(why, node)

    def note(self, why: str, node: int | None) -> None:
        """As ``refuse``, each time."""
        self._refusals.append((node, why))
        self._log(why)

    def why_not(self, node: int) -> str:
        """Why the newest agent of a node was rejected; "" if none was since an agent was admitted
        there.
        """
        found = [why for other, why in list(self._refusals) if other == node]
        return f"its agent was turned away: {found[-1]}" if found else ""

    def others(self, nodes: Collection[int]) -> str:
        """The newest rejected agents of none of these nodes, and the reasons; "" for none."""
        found = [why for other, why in list(self._refusals) if other not in nodes]
        return "; ".join(found[-SHOWN_REFUSALS:])

    def why_missing(self, missing: Sequence[int], lost: Mapping[int, str]) -> str:
        """Why each of some nodes is not there, and who else was rejected. ``lost``: why some are
        known not to exist.
        """
        what = "; ".join(
            f"node {n}: {lost.get(n) or self.why_not(n) or 'its agent has not dialled'}"
            for n in missing
        )
        others = self.others(missing)
        return f"{what} (turned away: {others})" if others else what

    def _open(self) -> None:
        try:
            self._listener = AgentListener(self.address, self._token, refused=self.refuse)
        except OSError as error:
            raise InfrastructureError(
                f"cannot listen for the nodes' agents at {self.address[0]}: {error.strerror}",
                hint="name an address of this machine that the nodes reach",
            ) from error
        self.address = self._listener.address
        self._board.listens(self._listener.fileno())

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
        elif state is not None and not known and self._heard(state):
            self._turn_away(
                link,
                hello,
                f"node {hello.node} has an agent already, at {state.hello.address}"
                f" ({state.hello.host})",
            )
        elif known and state is not None:
            if not state.lost and state.reported_dying:
                self._give_up(
                    state.node, "its connection was lost, and its processes counted as dead"
                )
            self._again(state, link, parcel)
        elif hello.processes and not self._processes.inherited:  # of an unknown coordinator
            link.put(protocol.Fence())
            hang_up(link)
        else:
            if state is not None and not state.lost:
                self._give_up(state.node, "another agent has taken its place")
            self._join(link, hello)

    def _again(self, state: NodeState, link: Link, parcel: Parcel) -> None:
        """A known agent has connected again."""
        if state.lost:
            link.put(protocol.Fence())
            hang_up(link)
            return
        state.hang_up()
        state.post.accept(parcel)
        state.link, state.how, state.left_ns, state.silent_ns = link, "", 0, self._clock_ns()
        link.put(self._welcome(), got=state.post.received)
        state.post.reconnected()
        self._board.connected(state)

    def _join(self, link: Link, hello: protocol.Hello) -> None:
        now_ns = self._clock_ns()
        state = NodeState(
            node=hello.node, hello=hello, link=link, silent_ns=now_ns, ping_due_ns=now_ns
        )
        self._states[hello.node] = state
        for refusal in [one for one in list(self._refusals) if one[0] == hello.node]:
            self._refusals.remove(refusal)
        link.put(self._welcome())
        self._board.connected(state)
        for stranger in hello.processes.keys() - {
            process.name for process in self._processes.of(hello.node)
        }:
            state.post.add(protocol.Signal(process=stranger, signum=signals.SIGKILL))
        self._reports.append(NodeJoined(node=hello.node, info=state.info(now_ns, heard_ns=now_ns)))

    def _welcome(self) -> protocol.Welcome:
        return protocol.Welcome(
            epoch=self._epoch,
            coordinator=self._id,
            beat_s=self._limits.beat_s,
            ping_s=self._limits.ping_s,
        )

    def _turn_away(self, link: Link, hello: protocol.Hello, why: str) -> None:
        self.refuse(f"an agent for node {hello.node} at {hello.address}: {why}", hello.node)
        link.put(protocol.Refused(why=why))
        hang_up(link)


def hang_up(link: Link) -> None:
    """Close a connection after its last message is sent."""
    with suppress(OSError):
        link.flush()
    link.close()


def _say(text: str) -> None:
    say(f"turned away: {text}", who="fleet")
