"""The coordinator's side of all nodes: to it what ``recovery.process.local.Children`` is to the
processes of one machine.

``recovery.nodes.coordinator.connections`` has the connections below. Measured with 8 ranks a node
at 25 steps a second: see ``docs/clusters.md``.
"""

from __future__ import annotations

import json
import signal as signals
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos.errors import InfrastructureError
from recovery.nodes.coordinator.connections import FIRST_PINGS, LOOK_S, Connections, FleetReport
from recovery.nodes.coordinator.datapath import DataPath
from recovery.nodes.coordinator.loss import Data, FleetLimits
from recovery.nodes.coordinator.node_state import (
    ClockMeasured,
    NodeEvent,
    NodeGone,
    NodeInfo,
    NodeJoined,
    NodeLost,
    NodeState,
    NodeWarned,
    NotKept,
    Remote,
)
from recovery.nodes.link import protocol
from recovery.nodes.link.files import land
from recovery.nodes.link.handshake import Refused
from recovery.process.local import Dying, Exited, Said
from recovery.process.pressure import Reading
from recovery.process.starvation import Pulse
from recovery.transport.progress_counters import NEVER, Mark
from recovery.transport.wire import Abort, Inquiry, Join, Message, Stop

__all__ = [
    "ClockMeasured",
    "Fleet",
    "FleetLimits",
    "FleetReport",
    "NodeEvent",
    "NodeGone",
    "NodeInfo",
    "NodeJoined",
    "NodeLost",
    "NodeWarned",
    "NotKept",
]

BYE_LIMIT_S = 10.0
KEPT_GONE = 1024  # processes
NEEDED = (Join, Abort, Stop, Inquiry)
"""Messages that a decision waits for."""


class Fleet(Connections):
    """Processes by name, wherever they are. For all else see ``Connections``.

    Of those that are gone the newest KEPT_GONE are known, for their last progress marks and for
    what is still to come of what they wrote. A name that is not known is that of a process gone
    long ago.
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
        self._directory: Path | None = None
        self._unkept: set[str] = set()
        self._processes: dict[str, Remote] = {}  # those that live, or are being started
        self._gone_ones: dict[str, Remote] = {}  # the oldest first
        self._inherited = False
        self._paths = DataPath()
        super().__init__(
            token=token,
            host=host,
            port=port,
            clock_ns=clock_ns,
            limits=limits,
            refused=refused,
            epoch=epoch,
        )

    def close(self) -> dict[int, str]:
        """End every agent; what could not be removed, as ``Children.close``: pids are of their
        nodes.
        """
        left = self.begin("", None)
        for state in self._states.values():
            state.post.add(protocol.Bye())
        until_s = time.monotonic() + BYE_LIMIT_S
        # They hang up. Were we to do so with something of theirs unread, they would not hear of it.
        while any(b.link is not None for b in self._states.values()) and time.monotonic() < until_s:
            self._turn(LOOK_S)
        self.away()
        return left

    # ---- processes

    def begin(self, arm: str, directory: Path | None) -> dict[int, str]:
        """End all processes of all nodes; files of those to come land below ``directory``. What
        could not be ended: pid (of its node) -> name. ``arm``: of what is to begin, for people.
        """
        there = [state for state in self._states.values() if self._is_there(state.node)]
        for state in there:
            state.cleared = None
            state.want(self._clock_ns())
            state.post.put(protocol.Clear(), needed=True)
        until_s = time.monotonic() + self._limits.clear_s
        while any(b.cleared is None and not b.lost for b in there) and time.monotonic() < until_s:
            self._turn(LOOK_S)
        left = {pid: name for state in there for pid, name in (state.cleared or {}).items()}
        late = {b.node for b in there if b.cleared is None and not b.lost}
        left |= {p.pid: p.name for p in self._processes.values() if p.node in late}
        for state in self._states.values():
            state.pressed = None  # of processes that are gone
        self._processes.clear()
        self._gone_ones.clear()
        self._reports = [
            news for news in self._reports if not isinstance(news, Said | Dying | Exited)
        ]
        self._directory = directory
        self._unkept.clear()
        return left

    def inherit(self, directory: Path, processes: Mapping[str, tuple[int, int]]) -> None:
        """Instead of ``begin``, of a coordinator that takes a job over: what agents go on with is
        not ended. ``processes``: that may live, by name: node and pid there; others are killed.
        Before any agent has dialled.
        """
        self._directory = directory
        self._inherited = True
        for name, (node, pid) in processes.items():
            self._processes[name] = Remote(name=name, node=node, pid=pid)

    def forsake(self, node: int, why: str) -> None:
        """Count inherited processes as ended whose node has not come back."""
        self._reports.append(NodeLost(node=node, why=why))
        for process in self._living(node):
            self._end(process, exit_code=None, signum=signals.SIGKILL, time_ns=self._clock_ns())

    def spawn(self, name: str, node: int, config: Mapping[str, Any], *, mode: str, log: str) -> int:
        """Start a process on a node; returns its pid there. ``config``: for its entry; ``log``: its
        event log, relative to the directory of ``begin``, "" for none. Raises NodeGone,
        InfrastructureError.
        """
        state = self._reachable(node)
        patience_s = self._limits.pass_s
        if self._silent_s(state) > patience_s:
            state.want(self._clock_ns())
            state.asked = True
            self._until(
                state, lambda: self._is_heard(state), patience_s, f"{name} is not asked for"
            )
        process = self._processes[name] = Remote(name=name, node=node)
        text = json.dumps(config, separators=(",", ":"))
        start = protocol.Start(
            process=name, mode="warm" if mode == "warm" else "cold", config=text, log=log
        )
        state.want(self._clock_ns())
        state.post.put(start, needed=True)
        try:
            self._until(
                state,
                lambda: bool(process.pid or process.error),
                self._limits.start_s,
                f"start {name}",
                silence_s=self._limits.answer_s,
            )
        except InfrastructureError:
            self._forget(process)
            state.post.add(protocol.Signal(process=name, signum=signals.SIGKILL))
            raise
        if process.error:
            self._forget(process)
            raise InfrastructureError(
                f"node {node} cannot start {name}: {process.error}", hint="see the node's agent"
            )
        return process.pid

    def alive(self, name: str) -> bool:
        """Whether its exit has not been reported yet."""
        return name in self._processes

    def send(self, name: str, message: Message) -> bool:
        """Send a message, with the next look at the nodes; False when the process is gone. It
        arrives once the node can be reached.
        """
        if (state := self._reached(name)) is None:
            return False
        if needed := isinstance(message, NEEDED):
            state.want(self._clock_ns())
        state.post.tell(name, message, needed=needed)
        return True

    def signal(self, name: str, signum: int) -> None:
        """Signal a process through its agent's pidfd; one already gone is no error."""
        if (state := self._reached(name)) is not None:
            state.post.add(protocol.Signal(process=name, signum=signum))
            self._flush(state)

    def mark(self, name: str) -> Mark:
        """The progress mark as last heard of, on our clock; readable after the process's
        death too.
        """
        return process.mark if (process := self._known(name)) is not None else NEVER

    def os_state(self, name: str) -> str:
        """The kernel's word on the process as last heard of, X when gone; "?" while its node is
        silent: what was true then says nothing about now.
        """
        process = self._processes.get(name)
        if process is None:
            return "X"
        state = self._states.get(process.node)
        stale_ns = (
            self._turned_ns - state.beat_ns
            if state is not None and state.link is not None
            else None
        )
        return "?" if stale_ns is None or stale_ns > self._limits.stale_s * 1e9 else process.state

    def pulse(self, name: str) -> Pulse:
        """What it got of the processors, as last heard of."""
        return process.pulse if (process := self._known(name)) is not None else Pulse()

    def pressures(self) -> Mapping[int, tuple[int, Reading]]:
        """Node -> how short of processors it was when it last said so, and when that was, on our
        clock.
        """
        return {
            node: state.pressed
            for node, state in self._states.items()
            if state.pressed and not state.lost
        }

    def wait(self, timeout_s: float) -> list[FleetReport]:
        """What happened; waits up to ``timeout_s`` for something to. A process's last messages, and
        what it wrote, come before its exit. What cannot be kept of it is dropped, and told.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = until_s - time.monotonic()
            self._turn(0.0 if self._reports else max(0.0, left_s))
            if self._reports or left_s <= 0:
                news, self._reports = self._reports, []
                return news

    # ---- what they say

    def _handle(self, state: NodeState, frame: Any) -> None:
        process = self._processes.get(frame.process) if hasattr(frame, "process") else None
        if process is not None and process.node != state.node:
            return
        match frame:
            case protocol.Started():
                if process is not None:
                    process.pid, process.error = frame.pid, frame.error
            case protocol.Heard():
                if process is not None:
                    self._paths.heard(state.node, frame.message, self._clock_ns())
                    self._reports.append(Said(process=process.name, message=frame.message))
            case protocol.Sinking():
                if process is not None:
                    self._warn_of(process)
            case protocol.Ended():
                if process is not None:
                    now_ns = self._clock_ns()
                    process.mark = self._mark(state, frame.mark)
                    time_ns = state.ours_ns(frame.time_ns, now_ns, self._boot)
                    self._end(
                        process, exit_code=frame.exit_code, signum=frame.signal, time_ns=time_ns
                    )
            case protocol.Beat():
                self._beat(state, frame)
            case protocol.Lines():
                self._land(state, frame)
            case _:
                self._handle_node(state, frame)

    def _handle_node(self, state: NodeState, frame: Any) -> None:
        match frame:
            case protocol.Pong():
                now_ns = self._clock_ns()
                state.clock.answered(
                    sent_ns=frame.sent_ns,
                    received_ns=frame.received_ns,
                    answered_ns=frame.answered_ns,
                    back_ns=now_ns,
                )
                offset = state.clock.changed(now_ns) if state.pings >= FIRST_PINGS else None
                if offset is not None:
                    self._reports.append(
                        ClockMeasured(
                            node=state.node, offset_ns=offset.offset_ns, bound_ns=offset.bound_ns
                        )
                    )
            case protocol.Cleared():
                state.cleared = frame.left
            case protocol.Pressed():
                read_ns = state.known_ns(frame.time_ns, self._clock_ns(), self._boot)
                if read_ns is not None:
                    reading = Reading(
                        cpus=frame.cpus,
                        some_s=frame.some_s,
                        steal_s=frame.steal_s,
                        ranks=frame.ranks,
                    )
                    state.pressed = (read_ns, reading)
            case protocol.Warned():
                self._reports.append(NodeWarned(node=state.node))

    def _beat(self, state: NodeState, beat: protocol.Beat) -> None:
        state.beat_ns = self._clock_ns()
        for name in beat.marks.keys() | beat.states.keys() | beat.pulses.keys():
            process = self._processes.get(name)
            if process is not None and process.node == state.node:
                if name in beat.marks:
                    process.mark = self._mark(state, beat.marks[name])
                process.state = beat.states.get(name, process.state)
                if name in beat.pulses:
                    process.pulse = Pulse(*beat.pulses[name])

    def _mark(self, state: NodeState, words: Any) -> Mark:
        try:
            return state.mark(words, self._clock_ns(), self._boot)
        except IndexError as error:
            raise Refused(f"a mark of an unknown phase: {words}") from error

    def _land(self, state: NodeState, lines: protocol.Lines) -> None:
        owner = self._known(Path(lines.file).stem)
        if self._directory is None or owner is None or owner.node != state.node:
            return  # of an arm that is over
        if lines.file in self._unkept:
            return
        try:
            land(self._directory, lines)
        except OSError as error:
            # Training goes on: a log that misses something says so, and proves nothing.
            self._unkept.add(lines.file)
            why = f"they could not be written here: {error.strerror}"
            self._reports.append(NotKept(file=lines.file, bytes=len(lines.text), why=why))

    def _end(
        self, process: Remote, *, exit_code: int | None, signum: int | None, time_ns: int
    ) -> None:
        process.told = True
        self._forget(process)
        self._reports.append(
            Exited(process=process.name, exit_code=exit_code, signal=signum, time_ns=time_ns)
        )

    def _forget(self, process: Remote) -> None:
        """It is gone."""
        process.gone = True
        self._processes.pop(process.name, None)
        self._gone_ones[process.name] = process
        while len(self._gone_ones) > KEPT_GONE:
            oldest = next(iter(self._gone_ones))
            del self._gone_ones[oldest]
            self._unkept = {file for file in self._unkept if Path(file).stem != oldest}

    def _known(self, name: str) -> Remote | None:
        return self._processes.get(name) or self._gone_ones.get(name)

    def _warn_of(self, process: Remote) -> None:
        if not process.told:
            process.told = True
            self._reports.append(Dying(process=process.name))

    def _inherits(self, hello: protocol.Hello) -> bool:
        return self._inherited

    def _living(self, node: int) -> Sequence[Remote]:
        return [p for p in self._processes.values() if p.node == node and p.pid]

    def _pace(self, state: NodeState) -> int:
        return self._paths.pace(state.node, self._processes.values())

    def _trains(self, state: NodeState) -> bool:
        return self._paths.trains(state.node, self._processes.values())

    def _data(self, state: NodeState) -> Data:
        return self._paths.since(state.node, state.left_ns, state.pace, self._processes.values())

    def _reached(self, name: str) -> NodeState | None:
        """The node of a process, None when either is gone."""
        process = self._processes.get(name)
        return None if process is None or (state := self._states[process.node]).lost else state
