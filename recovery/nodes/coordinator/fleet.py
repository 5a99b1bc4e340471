"""The coordinator's side of all nodes: the counterpart of ``recovery.process.local.Children``,
which has the processes of one machine.

``connections`` has the nodes, ``remote_processes`` the processes on them. Measured with 8 ranks a
node at 25 steps a second: see ``docs/clusters.md``.
"""

from __future__ import annotations

import json
import signal as signals
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.nodes.coordinator.connections import LOOK_S, Connections
from trainchaos.recovery.nodes.coordinator.node_state import (
    FleetReport,
    NodeGone,
    NodeLost,
    NodeState,
)
from trainchaos.recovery.nodes.link import protocol
from trainchaos.recovery.nodes.link.beat_rate import LEAST_S
from trainchaos.recovery.process.pressure import PressureReading
from trainchaos.recovery.process.stacks import STACK_SIGNAL
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.transport.wire import Abort, Inquiry, Join, Message, Stop

BYE_LIMIT_S = 10.0
SERVED_NS = 100_000_000
"""Between two turns while many processes are asked for at once; as long as a turn takes, if that is
longer: else thousands of nodes would each be served between two processes that are asked for.
"""
NEEDED = (Join, Abort, Stop, Inquiry)
"""Messages that a decision waits for."""


class Fleet(Connections):
    """Processes by name, whatever node they are on, and the nodes."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._stale_ns = self._limits.stale_s * self._limits.beat_s / LEAST_S * 1e9
        self._serves_ns = 0  # when there is a turn between two processes that are asked for
        self._asked: dict[str, NodeState] = {}  # processes that were asked for, and of whom
        self.mark = self._processes.mark
        """The last progress mark received of a process, on our clock; readable after its death."""

    def close(self) -> dict[int, str]:
        """End every agent; returns what could not be removed, as ``Children.close``: pids are of
        their nodes.
        """
        left = self.begin("", None)
        states = self.states.values()
        for state in states:
            state.post.add(protocol.Bye())
        until_s = time.monotonic() + BYE_LIMIT_S
        # The agents hang up. If this side did with unread data from them, they would miss it.
        while any(s.link is not None for s in states) and time.monotonic() < until_s:
            self.turn(LOOK_S)
        self.away()
        return left

    # ---- processes

    def begin(self, arm: str, directory: Path | None) -> dict[int, str]:
        """End all processes of all nodes; files of the processes to come are written below
        ``directory``. Returns what could not be ended: pid (of its node) -> name. ``arm``: name of
        the one that begins, for people.
        """
        there = self.present()
        for state in there:
            state.cleared = None
            state.want(self._clock_ns())
            state.post.add(protocol.Clear(), needed=True)
        until_s = time.monotonic() + self._limits.clear_s
        while any(b.cleared is None and not b.lost for b in there) and time.monotonic() < until_s:
            self.turn(LOOK_S)
        left = {pid: name for state in there for pid, name in (state.cleared or {}).items()}
        late = {b.node for b in there if b.cleared is None and not b.lost}
        left |= self._processes.unended(late)
        for state in self.states.values():
            state.pressed = None  # of exited processes
        self._processes.begin(directory)
        return left

    def inherit(self, directory: Path, processes: Mapping[str, tuple[int, int]]) -> None:
        """Instead of ``begin``, for a coordinator that takes a job over: the processes of agents
        are kept. ``processes``: those that may be alive, by name: node and pid there; all others
        are killed. Call before any agent has connected.
        """
        self._processes.inherit(directory, processes)

    def forsake(self, node: int, why: str) -> None:
        """Count inherited processes as ended if their node has not come back."""
        self._reports.append(NodeLost(node=node, why=why))
        self._processes.lose(node)

    def spawn(self, name: str, node: int, config: Mapping[str, Any], *, mode: str, log: str) -> int:
        """Start a process on a node; returns its pid there: ``ask_for`` and ``started``."""
        self.ask_for(name, node, config, mode=mode, log=log)
        return self.started(name, node)

    def ask_for(
        self, name: str, node: int, config: Mapping[str, Any], *, mode: str, log: str
    ) -> None:
        """Have a process started on a node; ``started`` has to be called next, or after further
        calls of this. ``config``: for its entry; ``log``: its event log, relative to the directory
        of ``begin``, "" for none. Raises NodeGone.
        """
        begun_ns = self._clock_ns()
        if begun_ns > max(self._serves_ns, self.turned_ns + SERVED_NS):
            self.turn(0.0)
            ended_ns = self._clock_ns()
            self._serves_ns = ended_ns + max(SERVED_NS, ended_ns - begun_ns)
        state = self.reachable(node)
        patience_s = self._limits.pass_s
        if self.silent_s(state) > patience_s:
            state.want(self._clock_ns())
            state.asked = True
            self.until(state, lambda: self.is_heard(state), patience_s, f"{name} is not asked for")
        self._processes.add(name, node)
        text = json.dumps(config, separators=(",", ":"))
        start = protocol.Start(
            process=name, mode="warm" if mode == "warm" else "cold", config=text, log=log
        )
        state.want(self._clock_ns())
        state.post.add(start, needed=True)
        self._asked[name] = state

    def started(self, name: str, node: int) -> int:
        """The pid of a process that was asked for, as soon as its agent has said it. Raises
        NodeGone, InfrastructureError.
        """
        state, process = self._asked.pop(name), self._processes.known(name)
        if process is None:
            raise NodeGone(node, f"it was lost before it had started {name}")
        try:
            self.until(
                state,
                lambda: bool(process.pid or process.error),
                self._limits.start_s,
                f"start {name}",
                silence_s=self._limits.answer_s,
            )
        except InfrastructureError:
            self._processes.forget(process)
            state.post.add(protocol.Signal(process=name, signum=signals.SIGKILL))
            raise
        if process.error:
            self._processes.forget(process)
            raise InfrastructureError(
                f"node {node} cannot start {name}: {process.error}", hint="see the node's agent"
            )
        return process.pid

    def alive(self, name: str) -> bool:
        """Whether its exit has not been reported yet."""
        return self._processes.living(name) is not None

    def send(self, name: str, message: Message) -> bool:
        """Send a message, with the next turn; False when the process has exited. It arrives once
        the node can be reached.
        """
        if (state := self._reached(name)) is None:
            return False
        if needed := isinstance(message, NEEDED):
            state.want(self._clock_ns())
        state.post.tell(name, message, needed=needed)
        return True

    def signal(self, name: str, signum: int) -> None:
        """Signal a process through its agent's pidfd; a process that has exited is no error."""
        if (state := self._reached(name)) is not None:
            if signum == STACK_SIGNAL:
                self._processes.asked(name)
            state.post.add(protocol.Signal(process=name, signum=signum))
            self.flush(state)

    def check(self, node: int, device: str) -> None:
        """Have a node's agent find out whether a device, as torch names it there, is fit;
        ``NodeChecked`` follows, unless the node is lost. Raises NodeGone.
        """
        state = self.reachable(node)
        state.post.add(protocol.Check(device=device))
        self.flush(state)

    def os_state(self, name: str) -> str:
        """The last process state received, as the kernel reports it, X when it has exited; "?"
        while its node is silent: an old state says nothing about now.
        """
        process = self._processes.living(name)
        if process is None:
            return "X"
        state = self.states.get(process.node)
        if state is None or state.link is None:
            return "?"
        return "?" if self.turned_ns - state.beat_ns > self._stale_ns else process.state

    def pulse(self, name: str) -> Pulse:
        """How much CPU time it got, by the last report."""
        return process.pulse if (process := self._processes.known(name)) is not None else Pulse()

    def stacks(self, name: str) -> str | None:
        """What it wrote since it was sent ``recovery.process.stacks.STACK_SIGNAL``, as far as its
        agent has sent it; None: it was not asked.
        """
        return process.stacks if (process := self._processes.known(name)) is not None else None

    def pressures(self) -> Mapping[int, tuple[int, PressureReading]]:
        """Node -> its last reading of CPU pressure, and when that was made, on our clock."""
        return {
            node: state.pressed
            for node, state in self.states.items()
            if state.pressed and not state.lost
        }

    def wait(self, timeout_s: float) -> list[FleetReport]:
        """What happened; waits up to ``timeout_s`` seconds for something to happen. A process's
        last messages, and what it wrote, come before its exit. What cannot be kept of its output is
        dropped, and reported.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = until_s - time.monotonic()
            self.turn(0.0 if self._reports else max(0.0, left_s))
            if self._reports or left_s <= 0:
                reports = self._reports[:]
                self._reports.clear()
                return reports

    def _reached(self, name: str) -> NodeState | None:
        """The node of a process, None when either is gone."""
        process = self._processes.living(name)
        if process is None:
            return None
        state = self.states[process.node]
        return None if state.lost else state
