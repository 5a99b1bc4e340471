"""Where the processes of a supervised job live: on this machine, or on nodes with agents
(``recovery.cli.nodes_home``)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from chaos.errors import InfrastructureError
from recovery.policy.jobconfig import LOOPBACK
from recovery.process.node import Node, script_recipe
from recovery.process.processes import become_subreaper
from recovery.process.starvation import Pulse
from recovery.rank.script import ScriptConfig
from recovery.transport.progress_counters import Mark
from recovery.transport.wire import Message


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A place for a process. ``device``: as torch names it; ``address``: where a rank there
    listens, "": on the loopback interface; ``events``: directory for its event log; ``logs``: for
    what it prints, None: where its supervisor does.
    """

    node: int
    device: str
    address: str
    events: Path
    logs: Path | None


class Home(Protocol):
    """Processes by name, as ``recovery.process.local.Children``, each at a spot."""

    store_host: str
    """Where the key-value store is to listen, so that all of them reach it."""

    def await_ready(self, stopped: Callable[[], bool]) -> None:
        """Wait until processes can be started, or ``stopped``. Raises InfrastructureError."""

    def inherit(self, processes: Mapping[str, tuple[int, int]]) -> None:
        """Instead of ``await_ready``: take over what may live, by name: node and pid. Raises
        InfrastructureError.
        """

    def spots(self) -> Sequence[Spot]:
        """Where a process can be started now, first come first served. Raises InfrastructureError:
        nowhere.
        """

    def start(self, name: str, spot: Spot, config: ScriptConfig, mode: str) -> int:
        """Start one; returns its pid. Raises InfrastructureError, ConnectionError when its node has
        been lost.
        """

    def may_return(self) -> bool:
        """Whether a place where nothing could be started may take processes again: then ask
        ``spots`` once more.
        """

    def alive(self, name: str) -> bool:
        """Whether its exit has not been reported yet."""

    def send(self, name: str, message: Message) -> bool:
        """Send a message; False when it is gone."""

    def signal(self, name: str, signum: int) -> None:
        """Signal it; one already gone is no error."""

    def mark(self, name: str) -> Mark:
        """Its progress mark."""

    def os_state(self, name: str) -> str:
        """The kernel's word on it, X when gone."""

    def pulse(self, name: str) -> Pulse:
        """What it got of the processors."""

    def wait(self, timeout_s: float) -> Sequence[Any]:
        """What happened (``recovery.process.local.Report``,
        ``recovery.nodes.coordinator.node_state.NodeEvent``), waiting up to ``timeout_s``.
        """

    def close(self) -> dict[int, str]:
        """End everything; what could not be removed: pid -> name."""


def least_taken(
    spots: Sequence[Spot],
    taken: Iterable[tuple[int, str]],
    avoids: Callable[[tuple[int, str]], bool] = lambda _: False,
) -> list[Spot]:
    """Spots in the order in which a process is to be tried at them; ``taken``: node and device of
    each that lives. A spot may be there several times, for as many processes. ``avoids``: whether
    processes kept failing at a node and device; one that is left empty by that is the last to be
    taken, unless a GPU would have to be shared instead.
    """
    held, there = Counter(taken), Counter((spot.node, spot.device) for spot in spots)

    def rating(spot: Spot) -> tuple[int, bool, int]:
        at = spot.node, spot.device
        crowd = held[at] // there[at]
        return crowd if spot.device.startswith("cuda") else 0, avoids(at), crowd

    return sorted(spots, key=rating)


class ThisMachine:
    """``devices``: to deal out; ``events``, ``logs``: as of ``Spot``. This process becomes a child
    subreaper.
    """

    store_host = LOOPBACK

    def __init__(self, devices: Sequence[str], events: Path, logs: Path | None) -> None:
        self._spots = [
            Spot(node=0, device=d, address="", events=events, logs=logs) for d in devices
        ]
        self.logs = logs
        become_subreaper()
        recipe = script_recipe()
        self._server = recipe.server()
        self._node = Node(self._server, recipe)
        self.fork = self._server.fork
        self.alive, self.send, self.signal = self._node.alive, self._node.send, self._node.signal
        self.mark, self.os_state, self.wait = self._node.mark, self._node.os_state, self._node.wait
        self.pulse = self._node.pulse

    def await_ready(self, stopped: Callable[[], bool]) -> None:
        """Until torch is imported."""
        self._server.await_ready()

    def inherit(self, processes: Mapping[str, tuple[int, int]]) -> None:
        """There is nothing to take over: processes of this machine end with their supervisor."""
        raise InfrastructureError(
            "ranks of one machine end with their supervisor",
            hint="start the job anew, with another --events",
        )

    def spots(self) -> Sequence[Spot]:
        """All devices."""
        return self._spots

    def start(self, name: str, spot: Spot, config: ScriptConfig, mode: str) -> int:
        """Fork it, or start it cold."""
        told = config.model_copy(update={"parent": os.getpid()}).model_dump_json().encode()
        return self._node.start(name, told, mode=mode, log=config.events / f"{name}.jsonl")

    def may_return(self) -> bool:
        """There is no other place."""
        return False

    def close(self) -> dict[int, str]:
        """End everything, the fork server too."""
        left = self._node.close()
        self._server.close()
        return left
