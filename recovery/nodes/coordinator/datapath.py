"""What the ranks of other nodes show about a silent node: whether its ranks still answer them."""

from __future__ import annotations

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
