"""The processes of one node: what happens to them, and how far they are, as messages for the
coordinator.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.nodes.link import protocol
from trainchaos.recovery.nodes.link.beat_rate import LEAST_S, QUIET
from trainchaos.recovery.nodes.link.files import FileTail
from trainchaos.recovery.nodes.link.link import Post
from trainchaos.recovery.process.forkserver import ForkServer, LaunchRecipe
from trainchaos.recovery.process.host import (
    Dying,
    Exited,
    MessageReceived,
    Report,
)
from trainchaos.recovery.process.local import LocalHost
from trainchaos.recovery.process.stacks import STACK_SIGNAL
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import Message

SILENT_NS = 100_000_000
KEPT_ENDED = 1024  # reported again to a coordinator that takes over


class AgentProcesses:
    """Processes of one arm. ``post``: takes the messages; ``scratch``: where files of the processes
    are, by ``Lines.file``; ``named``: see ``recovery.process.local.Children``. ``pids``: of the
    living; ``ended``: the newest KEPT_ENDED exits.

    Nothing else is kept of a process that has ended once the coordinator has confirmed what it
    wrote; its files are deleted then.
    """

    def __init__(
        self,
        server: ForkServer,
        recipe: LaunchRecipe,
        post: Post,
        scratch: Path,
        *,
        named: bool = False,
    ) -> None:
        self._node = LocalHost(server, recipe, named=named)
        self._post, self._scratch = post, scratch
        self._tails: dict[str, list[FileTail]] = {}
        self._ranks: set[str] = set()
        self._spoken: set[str] = set()
        self._deaf: set[str] = set()
        self._asked: dict[str, str] = {}  # for their stacks: what they had written at the last look
        self.pids: dict[str, int] = {}
        self.ended: deque[protocol.Ended] = deque(maxlen=KEPT_ENDED)

    def fileno(self) -> int:
        """Readable when ``reports`` has something."""
        return self._node.fileno()

    def reports(self) -> list[Report]:
        """What happened since the last call."""
        return self._node.wait(0)

    def tell_of(self, reports: Iterable[Report]) -> None:
        """Turn reports into messages; an exit comes after everything that the process wrote."""
        heard: list[tuple[str, Message]] = []
        for report in reports:
            if isinstance(report, MessageReceived):
                self._spoken.add(report.process)
                heard.append((report.process, report.message))
            else:
                self._pass_on(heard)
                self._tell_of_end(report)
        self._pass_on(heard)

    def _pass_on(self, heard: list[tuple[str, Message]]) -> None:
        """Send messages of processes, and forget them here."""
        for frame in protocol.Heard.of(heard):
            self._post.add(frame)
        heard.clear()

    def _tell_of_end(self, report: Dying | Exited) -> None:
        if isinstance(report, Dying):
            self._post.add(protocol.Sinking(process=report.process))
        else:
            self._send_files(report.process, last=True)
            if report.process in self._asked:
                self._send_stacks(report.process)
            self.pids.pop(report.process, None)
            ended = protocol.Ended(
                process=report.process,
                exit_code=report.exit_code,
                signal=report.signal,
                time_ns=report.time_ns,
                mark=self._node.mark(report.process),
            )
            self.ended.append(ended)
            for book in (self._ranks, self._spoken, self._deaf):
                book.discard(report.process)
            self._post.add(ended, then=partial(self._forget, report.process))

    def _forget(self, process: str) -> None:
        """The coordinator has all that the process wrote."""
        for tail in self._tails.pop(process, ()):
            with suppress(OSError):
                tail.path.unlink()

    def forward(self) -> None:
        """Send new content of the processes' files."""
        for name in self.pids:
            self._send_files(name)

    def marks(self) -> Mapping[str, Mark]:
        """The marks of all living processes."""
        return {name: self._node.mark(name) for name in self.pids}

    def states(self) -> Mapping[str, str]:
        """The kernel's state of all living processes."""
        return {name: self._node.os_state(name) for name in self.pids}

    def ranks(self) -> Mapping[str, int]:
        """The pids of processes that train, or wait to."""
        return {name: pid for name, pid in self.pids.items() if name in self._ranks}

    def pulses(self) -> Mapping[str, tuple[float, bool]]:
        """The CPU time of silent processes; that of others is not measured."""
        now_ns = time.monotonic_ns()
        silent = [name for name in self.pids if now_ns - self._node.mark(name).time_ns > SILENT_NS]
        return {name: astuple(self._node.pulse(name)) for name in silent}

    def start(self, start: protocol.Start, waiting: Callable[[], None] | None = None) -> None:
        """Start a process, and report whether it worked. ``waiting``: called repeatedly
        meanwhile.
        """
        try:
            config = json.loads(start.config)
            config["parent"] = os.getpid()
            log = self._place(start.log) if start.log else None
            files = [FileTail(log, start.log, whole_lines=True)] if log else []
            output = config.get("log")
            if output and Path(output).is_relative_to(self._scratch):
                name = str(Path(output).relative_to(self._scratch))
                files.append(FileTail(self._place(name), name, whole_lines=False))
            data = json.dumps(config, separators=(",", ":")).encode()
            pid = self._node.start(start.process, data, mode=start.mode, log=log, waiting=waiting)
        except (InfrastructureError, OSError, ValueError, TypeError) as error:
            self._post.add(protocol.Started(process=start.process, pid=0, error=str(error)))
            return
        self._tails[start.process], self.pids[start.process] = files, pid
        if log is not None:
            self._ranks.add(start.process)
        self._post.add(protocol.Started(process=start.process, pid=pid))

    def tell(self, process: str, message: Message) -> None:
        """Pass a message on. A process that stops reading is cut off: it would block the agent
        again with each message.
        """
        hears = process in self.pids and process not in self._deaf
        if hears and not self._node.send(process, message):
            self._deaf.add(process)

    def signal(self, process: str, signum: int) -> None:
        """Signal a process; one that has exited is no error. What it wrote of its stacks is sent
        before it is killed.
        """
        if process in self.pids:
            self._node.signal(process, signum)
            if signum == STACK_SIGNAL:
                self._asked[process] = ""
            elif signum == signal.SIGKILL and process in self._asked and self._node.stacks(process):
                self._send_stacks(process)  # else what is seen of it until it is dead

    def forward_stacks(self) -> None:
        """Send stacks that are complete: unchanged since the last look."""
        for process, before in [*self._asked.items()]:
            found = self._node.stacks(process)
            if found is None or (found and found == before):
                self._send_stacks(process)
            else:
                self._asked[process] = found

    def _send_stacks(self, process: str) -> None:
        del self._asked[process]
        if found := self._node.stacks(process):
            self._post.add(protocol.Stacks(process=process, text=found))

    def warn(self) -> None:
        """SIGTERM to all ranks that can take it as a notice; other processes would just end."""
        for name in self._ranks & self._spoken & self.pids.keys():
            self._node.signal(name, signal.SIGTERM)

    def clear(self) -> dict[int, str]:
        """Kill and reap everything; returns what could not be removed. Messages of what they wrote
        follow; this object cannot be used afterwards.
        """
        left = self._node.close()
        for name in self.pids:
            self._send_files(name, last=True)
        return left

    def files(self) -> list[Path]:
        """All files that its processes wrote here and that were, or have to be, sent."""
        return [tail.path for tails in self._tails.values() for tail in tails]

    def _send_files(self, name: str, *, last: bool = False) -> None:
        for tail in self._tails[name]:
            for piece in tail.new(last=last):
                self._post.add(piece)

    def _place(self, name: str) -> Path:
        """The path of a file of this name; creates its directory."""
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"a file outside of the scratch directory: {name!r}")
        path = self._scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class Beats:
    """The marks and states reported last, so that only changes are sent. Make a new one for a
    coordinator that may know nothing. ``beat_s``: what it said.
    """

    def __init__(self, beat_s: float = LEAST_S) -> None:
        self._beat_s = beat_s
        self._marks: Mapping[str, Mark] = {}
        self._states: Mapping[str, str] = {}
        self._sent_s = 0.0

    def due(
        self, processes: AgentProcesses, now_s: float, *, at_once: bool
    ) -> protocol.Beat | None:
        """What to send now; with no change, only when nothing was sent for QUIET times
        as long. ``at_once``: a change does not wait.
        """
        marks, states = processes.marks(), processes.states()
        moved = {name: mark for name, mark in marks.items() if self._marks.get(name) != mark}
        turned = {name: state for name, state in states.items() if self._states.get(name) != state}
        changed = bool(moved) or any(
            "t" in (turned[name] + self._states.get(name, "")).lower() for name in turned
        )
        due_s = self._sent_s + self._beat_s * (1 if changed else QUIET)
        if now_s < due_s and not (changed and at_once):
            return None
        self._marks, self._states, self._sent_s = marks, states, now_s
        return protocol.Beat(
            time_ns=time.monotonic_ns(),
            marks=moved,
            states=turned,
            pulses=dict(processes.pulses()),
        )
