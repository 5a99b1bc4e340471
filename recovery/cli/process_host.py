"""Runs the processes of a supervised job: on this machine, or on nodes with agents
(``recovery.cli.nodes_host``).
"""

from __future__ import annotations

import heapq
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.process.node import Node, script_recipe
from trainchaos.recovery.process.processes import become_subreaper
from trainchaos.recovery.process.starvation import Pulse
from trainchaos.recovery.rank.script import ScriptConfig
from trainchaos.recovery.transport.progress_counters import Mark
from trainchaos.recovery.transport.wire import Message


@dataclass(frozen=True, kw_only=True)
class ProcessPlacement:
    """A place for a process. ``device``: as torch names it; ``address``: where a rank there
    listens, "": on the loopback interface; ``events``: directory for its event log; ``logs``: for
    its output, None: the supervisor's output.
    """

    node: int
    device: str
    address: str
    events: Path
    logs: Path | None


class ProcessHost(Protocol):
    """Processes by name, as ``recovery.process.local.Children``, each at a spot."""

    store_host: str
    """Where the key-value store listens, so that all processes reach it."""

    def await_ready(self, stopped: Callable[[], bool]) -> None:
        """Wait until processes can be started, or ``stopped``. Raises InfrastructureError."""

    def inherit(self, processes: Mapping[str, tuple[int, int]]) -> None:
        """Instead of ``await_ready``: take over processes that may be alive, by name: node and pid.
        Raises InfrastructureError.
        """

    def spots(self) -> Sequence[ProcessPlacement]:
        """Where a process can be started now, preferred spots first. Raises InfrastructureError if
        nowhere.
        """

    def start(self, name: str, spot: ProcessPlacement, config: ScriptConfig, mode: str) -> int:
        """Start a process; returns its pid. Raises InfrastructureError, ConnectionError when its
        node has been lost.
        """

    def may_return(self) -> bool:
        """Whether a place that could not start a process may do so again: then call ``spots`` once
        more.
        """

    def alive(self, name: str) -> bool:
        """Whether its exit has not been reported yet."""

    def send(self, name: str, message: Message) -> bool:
        """Send a message; False when the process has exited."""

    def signal(self, name: str, signum: int) -> None:
        """Signal a process; one that has exited is no error."""

    def mark(self, name: str) -> Mark:
        """Its progress mark."""

    def os_state(self, name: str) -> str:
        """The process state as the kernel reports it, X when it has exited."""

    def pulse(self, name: str) -> Pulse:
        """How much CPU time it got."""

    def stacks(self, name: str) -> str | None:
        """What it wrote since it was sent ``recovery.process.stacks.STACK_SIGNAL``; None: nothing
        can be read.
        """

    def wait(self, timeout_s: float) -> Sequence[Any]:
        """What happened (``recovery.process.local.Report``,
        ``recovery.nodes.coordinator.node_state.NodeEvent``), waiting up to ``timeout_s``.
        """

    def close(self) -> dict[int, str]:
        """End everything; returns what could not be removed: pid -> name."""


@runtime_checkable
class Remote(Protocol):
    """A host that takes a while to start a process, and can start several at a time: ``start`` in
    two parts.
    """

    def ask_for(self, name: str, spot: ProcessPlacement, config: ScriptConfig, mode: str) -> None:
        """Have a process started. Raises InfrastructureError, ConnectionError as ``start``."""

    def started(self, name: str, spot: ProcessPlacement) -> int:
        """Its pid, once it is started. Raises InfrastructureError, ConnectionError as ``start``."""


Avoids = Callable[[tuple[int, str]], bool]


class LeastTaken:
    """Spots in the order in which to try them for one process after the other, each as soon as the
    one before is started; ``taken``: node and device of each living process. A spot may occur
    several times, for as many processes. ``avoids``: whether processes kept failing at a node and
    device; a spot that stays empty for that reason is taken last, unless a GPU would have to be
    shared instead.

    To start one process costs the logarithm of the number of spots; it would cost all of them to
    order them anew, and a job of many nodes that many times as much.
    """

    def __init__(
        self,
        spots: Sequence[ProcessPlacement],
        taken: Iterable[tuple[int, str]],
        avoids: Avoids = lambda _: False,
    ) -> None:
        self._avoids = avoids
        self._held = Counter(taken)
        self._there = Counter((spot.node, spot.device) for spot in spots)
        self._left = [(self._rating(spot), turn, spot) for turn, spot in enumerate(spots)]
        heapq.heapify(self._left)
        self._closed: set[int] = set()

    def best(self) -> ProcessPlacement | None:
        """The spot to try next; None: there is none."""
        while self._left:
            rating, turn, spot = self._left[0]
            if spot.node in self._closed:
                heapq.heappop(self._left)
                continue
            now = self._rating(spot)
            if now <= rating:
                return spot
            heapq.heapreplace(self._left, (now, turn, spot))
        return None

    def took(self, spot: ProcessPlacement) -> None:
        """A process was started there."""
        self._held[spot.node, spot.device] += 1

    def close(self, node: int) -> None:
        """A node takes no process now: its spots are not tried again."""
        self._closed.add(node)

    def in_order(self) -> list[ProcessPlacement]:
        """All spots, as they are to be tried for the next process."""
        return [spot for _, _, spot in sorted(self._left, key=lambda each: each[:2])]

    def _rating(self, spot: ProcessPlacement) -> tuple[int, bool, int]:
        at = spot.node, spot.device
        crowd = self._held[at] // self._there[at]
        return crowd if spot.device.startswith("cuda") else 0, self._avoids(at), crowd


def least_taken(
    spots: Sequence[ProcessPlacement],
    taken: Iterable[tuple[int, str]],
    avoids: Avoids = lambda _: False,
) -> list[ProcessPlacement]:
    """Spots in the order in which to try them for one process (``LeastTaken``)."""
    return LeastTaken(spots, taken, avoids).in_order()


class LocalProcessHost:
    """``devices``: to assign; ``events``, ``logs``: as in ``ProcessPlacement``. This process
    becomes a child subreaper.
    """

    store_host = LOOPBACK

    def __init__(self, devices: Sequence[str], events: Path, logs: Path | None) -> None:
        self._spots = [
            ProcessPlacement(node=0, device=d, address="", events=events, logs=logs)
            for d in devices
        ]
        self.logs = logs
        become_subreaper()
        recipe = script_recipe()
        self._server = recipe.server()
        self._node = Node(self._server, recipe)
        self.fork = self._server.fork
        self.alive, self.send, self.signal = self._node.alive, self._node.send, self._node.signal
        self.mark, self.os_state, self.wait = self._node.mark, self._node.os_state, self._node.wait
        self.pulse, self.stacks = self._node.pulse, self._node.stacks

    def await_ready(self, stopped: Callable[[], bool]) -> None:
        """Wait until torch is imported."""
        self._server.await_ready()

    def inherit(self, processes: Mapping[str, tuple[int, int]]) -> None:
        """Nothing can be taken over: processes of this machine end with their supervisor."""
        raise InfrastructureError(
            "ranks of one machine end with their supervisor",
            hint="start the job anew, with another --events",
        )

    def spots(self) -> Sequence[ProcessPlacement]:
        """All devices."""
        return self._spots

    def start(self, name: str, spot: ProcessPlacement, config: ScriptConfig, mode: str) -> int:
        """Fork it, or start it cold."""
        told = config.model_copy(update={"parent": os.getpid()}).model_dump_json().encode()
        return self._node.start(name, told, mode=mode, log=config.events / f"{name}.jsonl")

    def may_return(self) -> bool:
        """False: there is no other place."""
        return False

    def close(self) -> dict[int, str]:
        """End everything, the fork server too."""
        left = self._node.close()
        self._server.close()
        return left
