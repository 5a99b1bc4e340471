"""What a coordinator knows about the processes of all nodes, from the messages of their agents."""

from __future__ import annotations

import heapq
import signal as signals
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from trainchaos.recovery.nodes.coordinator.loss import MOVED_STEPS, PROOF_S, Data
from trainchaos.recovery.nodes.coordinator.node_state import (
    FleetReport,
    NodeState,
    NotKept,
    RemoteProcess,
)
from trainchaos.recovery.nodes.link import protocol
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.nodes.link.files import land
from trainchaos.recovery.process.host import Dying, Exited, MessageReceived
from trainchaos.recovery.process.stacks import MOST_READ
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.transport.progress_counters import NEVER, PHASES, Mark
from trainchaos.recovery.transport.stream import MessageError
from trainchaos.recovery.transport.wire import Parked

KEPT_GONE = 1024  # processes
Reach = tuple[int, int]
"""Generation, and steps committed."""
NOWHERE: Reach = (0, 0)
NO_GENERATION = -1


def _reach(process: RemoteProcess) -> Reach:
    return process.mark.generation, process.mark.committed


class RemoteProcesses:
    """Processes by name. ``reports``: what happens to them is appended there; ``inherited``: they
    were started by an earlier coordinator.

    Of exited processes the newest KEPT_GONE are remembered, for their last progress marks and for
    output that is still to come. An unknown name is that of a process that exited long ago.
    """

    def __init__(self, reports: list[FleetReport], clock_ns: Callable[[], int]) -> None:
        self._reports = reports
        self._clock_ns = clock_ns
        self._boot = boot_id()
        self._directory: Path | None = None
        self._unkept: set[str] = set()
        self._living: dict[str, RemoteProcess] = {}  # or being started
        self.living: Callable[[str], RemoteProcess | None] = self._living.get
        """A process whose exit has not been reported yet."""
        self._gone: dict[str, RemoteProcess] = {}  # the oldest first
        # node -> when the connections of one of its ranks failed last
        self._failed_ns: dict[int, int] = {}
        self._on: dict[int, dict[str, RemoteProcess]] = {}  # node -> its living processes
        self._reach: dict[int, Reach] = {}  # node -> that of its furthest process
        self._two: list[tuple[Reach, int]] | None = None  # the furthest nodes; None: not known
        self.inherited = False

    def begin(self, directory: Path | None) -> None:
        """Forget all of them; files of the processes to come are written below ``directory``."""
        self._living.clear()
        self._on.clear()
        self._reach.clear()
        self._two = None
        self._gone.clear()
        self._reports[:] = [
            r for r in self._reports if not isinstance(r, MessageReceived | Dying | Exited)
        ]
        self._directory = directory
        self._unkept.clear()

    def inherit(self, directory: Path, processes: Mapping[str, tuple[int, int]]) -> None:
        """Add those that an earlier coordinator started: name -> node and pid there."""
        self._directory = directory
        self.inherited = True
        for name, (node, pid) in processes.items():
            self.add(name, node, pid)

    def add(self, name: str, node: int, pid: int = 0) -> RemoteProcess:
        """Add one that is being started, or lives."""
        process = self._living[name] = RemoteProcess(name=name, node=node, pid=pid)
        self._on.setdefault(node, {})[name] = process
        self._moved(process)
        return process

    def known(self, name: str) -> RemoteProcess | None:
        """A process that lives, or was among the last to end."""
        return self._living.get(name) or self._gone.get(name)

    def mark(self, name: str) -> Mark:
        """See ``Fleet``; asked for each rank in each look at them."""
        process = self._living.get(name) or self._gone.get(name)
        return process.mark if process is not None else NEVER

    def of(self, node: int) -> list[RemoteProcess]:
        """The processes of a node that were started and have not ended."""
        return [process for process in self._on.get(node, {}).values() if process.pid]

    def unended(self, nodes: set[int]) -> dict[int, str]:
        """Pid -> name of those of some nodes that have not ended, or are being started."""
        return {p.pid: p.name for p in self._living.values() if p.node in nodes}

    def lose(self, node: int) -> None:
        """All processes of a node have ended, as if killed."""
        for process in self.of(node):
            self._end(process, exit_code=None, signum=signals.SIGKILL, time_ns=self._clock_ns())

    def asked(self, name: str) -> None:
        """A process is asked for its stacks; earlier ones do not count."""
        if (process := self._living.get(name)) is not None:
            process.stacks = ""

    def warn_of(self, process: RemoteProcess) -> None:
        """It will have ended in a moment."""
        if not process.reported_dying:
            process.reported_dying = True
            self._reports.append(Dying(process=process.name))

    def forget(self, process: RemoteProcess) -> None:
        """It has exited."""
        self._living.pop(process.name, None)
        there = self._on.get(process.node, {})
        there.pop(process.name, None)
        self._reach[process.node] = max(map(_reach, there.values()), default=NOWHERE)
        self._two = None
        self._gone[process.name] = process
        while len(self._gone) > KEPT_GONE:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._unkept = {file for file in self._unkept if Path(file).stem != oldest}

    # ---- messages of agents

    def handle(self, state: NodeState, frame: Any) -> None:
        """Handle a message about a process, from its node's agent. Raises MessageError."""
        match frame:
            case protocol.Beat():
                self._beat(state, frame)
            case protocol.Lines():
                self._land(state, frame)
            case protocol.Heard():
                for name, message in frame.messages():
                    if self._of(state, name) is not None:
                        if isinstance(message, Parked) and message.why == "failed":
                            self._failed_ns[state.node] = self._clock_ns()
                        self._reports.append(MessageReceived(process=name, message=message))
            case protocol.Started() | protocol.Sinking() | protocol.Stacks() | protocol.Ended():
                process = self._living.get(frame.process)
                if process is not None and process.node == state.node:
                    self._handle_one(state, process, frame)

    def _handle_one(self, state: NodeState, process: RemoteProcess, frame: Any) -> None:
        match frame:
            case protocol.Started():
                process.pid, process.error = frame.pid, frame.error
            case protocol.Sinking():
                self.warn_of(process)
            case protocol.Stacks():
                process.stacks = frame.text[:MOST_READ]
            case protocol.Ended():
                now_ns = self._clock_ns()
                (process.mark,) = self._marks(state, [frame.mark])
                time_ns = state.ours_ns(frame.time_ns, now_ns, self._boot)
                self._end(process, exit_code=frame.exit_code, signum=frame.signal, time_ns=time_ns)

    def _beat(self, state: NodeState, beat: protocol.Beat) -> None:
        state.beat_ns = self._clock_ns()
        for name, mark in zip(beat.marks, self._marks(state, beat.marks.values()), strict=True):
            if (process := self._of(state, name)) is not None:
                process.mark = mark
                self._moved(process)
        for name, letter in beat.states.items():
            if (process := self._of(state, name)) is not None:
                process.state = letter
        for name, pulse in beat.pulses.items():
            if (process := self._of(state, name)) is not None:
                process.pulse = Pulse(*pulse)

    def _moved(self, process: RemoteProcess) -> None:
        """Its mark is another one. Within a node no mark goes back but by a new generation."""
        reach = _reach(process)
        if reach > self._reach.get(process.node, NOWHERE):
            self._reach[process.node], self._two = reach, None

    def _of(self, state: NodeState, name: str) -> RemoteProcess | None:
        """A process, if it lives on that node."""
        process = self._living.get(name)
        return process if process is not None and process.node == state.node else None

    def _marks(self, state: NodeState, marks: Collection[Mark]) -> list[Mark]:
        if any(mark.phase not in PHASES for mark in marks):
            raise MessageError(f"a mark of an unknown phase: {marks}")
        return list(state.marks(marks, self._clock_ns(), self._boot))

    def _land(self, state: NodeState, lines: protocol.Lines) -> None:
        owner = self.known(Path(lines.file).stem)
        if self._directory is None or owner is None or owner.node != state.node:
            return  # of an arm that is over
        if lines.file in self._unkept:
            return
        try:
            land(self._directory, lines)
        except OSError as error:
            # Training goes on: a log with gaps shows them, and proves nothing.
            self._unkept.add(lines.file)
            why = f"they could not be written here: {error.strerror}"
            self._reports.append(NotKept(file=lines.file, bytes=len(lines.text), why=why))

    def _end(
        self, process: RemoteProcess, *, exit_code: int | None, signum: int | None, time_ns: int
    ) -> None:
        process.reported_dying = True
        self.forget(process)
        self._reports.append(
            Exited(process=process.name, exit_code=exit_code, signal=signum, time_ns=time_ns)
        )

    # ---- whether a node is alive

    def pace(self, node: int) -> int:
        """The furthest step that a rank of another node has committed in the newest generation."""
        two, newest = self._furthest()
        steps = (step for (generation, step), n in two if n != node and generation == newest)
        return max(steps, default=0)

    def trains(self, node: int) -> bool:
        """Whether a node has ranks in the newest generation."""
        return self._reach.get(node, NOWHERE)[0] == self._furthest()[1]

    def data(self, state: NodeState) -> Data:
        """What the ranks of other nodes have shown about a silent node since its connection ended:
        no rank commits a step without that node's ranks.
        """
        others = (ns for other, ns in self._failed_ns.items() if other != state.node)
        if any(abs(ns - state.left_ns) <= PROOF_S * 1e9 for ns in others):
            return "failed"
        moved = self.pace(state.node) >= state.pace + MOVED_STEPS
        return "lives" if moved and self.trains(state.node) else "unknown"

    def _furthest(self) -> tuple[list[tuple[Reach, int]], int]:
        """The two nodes that are furthest, and the newest generation: of thousands of processes,
        nothing else is looked at.
        """
        if self._two is None:
            self._two = heapq.nlargest(2, ((reach, node) for node, reach in self._reach.items()))
        newest = self._two[0][0][0] if self._two else 0
        return self._two, newest or NO_GENERATION
