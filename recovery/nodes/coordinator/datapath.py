"""What the ranks of other nodes show about a silent node: whether its ranks still answer them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from trainchaos.recovery.nodes.coordinator.loss import MOVED_STEPS, PROOF_S, Data
from trainchaos.recovery.nodes.coordinator.node_state import RemoteProcess
from trainchaos.recovery.transport.wire import Parked


class DataPath:
    """Times in nanoseconds of the coordinator's clock."""

    def __init__(self) -> None:
        # node -> when the connections of one of its ranks failed last
        self._failed_ns: dict[int, int] = {}

    def heard(self, node: int, message: object, now_ns: int) -> None:
        """A rank of a node sent a message."""
        if isinstance(message, Parked) and message.why == "failed":
            self._failed_ns[node] = now_ns

    @staticmethod
    def trains(node: int, processes: Iterable[RemoteProcess]) -> bool:
        """Whether a node has ranks in the newest generation."""
        living = [p for p in processes if not p.gone and p.mark.generation]
        newest = max((p.mark.generation for p in living), default=0)
        return any(p.node == node and p.mark.generation == newest for p in living)

    @staticmethod
    def pace(node: int, processes: Iterable[RemoteProcess]) -> int:
        """The furthest step that a rank of another node has committed in the newest generation."""
        living = [p for p in processes if not p.gone]
        newest = max((p.mark.generation for p in living), default=0)
        elsewhere = (p for p in living if p.node != node and p.mark.generation == newest)
        return max((p.mark.committed for p in elsewhere), default=0)

    def since(
        self, node: int, ended_ns: int, pace: int, processes: Iterable[RemoteProcess]
    ) -> Data:
        """What was seen since the connection of a node ended, when ``pace`` had the given value. No
        rank commits a step without that node's ranks.
        """
        others = (ns for other, ns in self._failed_ns.items() if other != node)
        if any(abs(ns - ended_ns) <= PROOF_S * 1e9 for ns in others):
            return "failed"
        processes = list(processes)
        if self.trains(node, processes) and self.pace(node, processes) >= pace + MOVED_STEPS:
            return "lives"
        return "unknown"


class Furthest:
    """How far the living processes of each node have come, so that ``DataPath`` need not be asked
    with all of them: what it says depends on the furthest of a node, and of the two nodes that are
    furthest, alone.
    """

    def __init__(self) -> None:
        self._by_node: dict[int, dict[str, RemoteProcess]] = {}
        self._best: dict[int, tuple[tuple[int, int], RemoteProcess]] = {}
        self._two: list[RemoteProcess] | None = None  # None: not known

    def clear(self) -> None:
        """Forget all processes."""
        self._by_node.clear()
        self._best.clear()
        self._two = None

    def add(self, process: RemoteProcess) -> None:
        """A process lives, or is being started."""
        self._by_node.setdefault(process.node, {})[process.name] = process
        self.moved(process)

    def remove(self, process: RemoteProcess) -> None:
        """It has ended."""
        people = self._by_node.get(process.node, {})
        known = people.pop(process.name, None) is not None
        if not known or self._best[process.node][1] is not process:
            return
        self._two = None
        if people:
            best = max(people.values(), key=_reach)
            self._best[process.node] = _reach(best), best
        else:
            del self._best[process.node], self._by_node[process.node]

    def moved(self, process: RemoteProcess) -> None:
        """Its mark is another one. Within a node no mark goes back but by a new generation."""
        reach = _reach(process)
        before, best = self._best.get(process.node, (_NOWHERE, None))
        if best is not process and best is not None and reach <= before:
            return
        self._best[process.node] = reach, process
        if reach < before:
            self._two = None
        elif self._two is not None:
            others = [one for one in self._two if one.node != process.node]
            self._two = sorted([*others, process], key=_reach, reverse=True)[:2]

    def on(self, node: int) -> list[RemoteProcess]:
        """The processes of a node."""
        return list(self._by_node.get(node, {}).values())

    def beside(self, node: int) -> list[RemoteProcess]:
        """The furthest process of a node, and those of the two furthest nodes."""
        if self._two is None:
            best = (process for _, process in self._best.values())
            self._two = heapq.nlargest(2, best, key=_reach)
        _, own = self._best.get(node, (_NOWHERE, None))
        return [own, *self._two] if own is not None else self._two


_NOWHERE = (-1, -1)


def _reach(process: RemoteProcess) -> tuple[int, int]:
    return process.mark.generation, process.mark.committed
