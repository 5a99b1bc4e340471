"""Adapts controls of nodes to processes: the cluster supplies the node of a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.launch.launcher import LinkControl, MachineControl
from trainchaos.harness.undo.base import Undo

NodeOf = Callable[[str], int]
"""The node of a process started in this arm, dead or alive. Raises KeyError."""


class LinksByNode:
    """Maps links between processes to links between their nodes; implements
    ``harness.launch.launcher.LinkControl``.
    """

    def __init__(self, links: LinkControl, node_of: NodeOf) -> None:
        self._links = links
        self.probed = links.probed
        self._node_of = node_of

    def refuses(self, link: tuple[str, str]) -> str | None:
        return self._links.refuses(self.over(link))

    def over(self, link: tuple[str, str]) -> tuple[str, str]:
        """The link between their nodes."""
        return str(self._node_of(link[0])), str(self._node_of(link[1]))

    def shape(self, links: Sequence[tuple[str, str]], shape: LinkShape) -> str:
        """Shape the links between different nodes; the ranks of a node share them."""
        between = list(dict.fromkeys(map(self.over, links)))
        return self._links.shape([link for link in between if not self._links.refuses(link)], shape)

    def probe(self, link: tuple[str, str]) -> int:
        return self._links.probe(self.over(link))


class GroupsByNode:
    """Limits a whole node in place of a process; implements
    ``harness.launch.launcher.GroupControl``. The limits end with the node, so a lost node leaves
    nothing to undo.
    """

    def __init__(self, machines: MachineControl, node_of: NodeOf) -> None:
        self._machines = machines
        self._node_of = node_of
        self._before: dict[tuple[int, str], int] = {}  # counts of a node when its limit was set
        self._limited: set[int] = set()

    def undo(self, process: str) -> Sequence[Undo]:
        """No records: see the class."""
        return ()

    def limit_memory(self, process: str, mib: int) -> None:
        """Limit the memory of its node."""
        node = self._note(process, "oom_kills")
        self._machines.limit_memory(node, mib)

    def oom_kills(self, process: str) -> int:
        """Kills on its node since the limit was set."""
        return self._since(process, "oom_kills")

    def limit_cores(self, processes: Sequence[str], cores: float) -> None:
        """Limit each of their nodes."""
        for node in dict.fromkeys(self._note(process, "throttled") for process in processes):
            self._machines.limit_cores(node, cores)

    def throttled(self, process: str) -> int:
        """Throttled periods of its node since the limit was set."""
        return self._since(process, "throttled")

    def release(self, process: str) -> None:
        """Lift all limits of its node."""
        node = self._node_of(process)
        if node in self._limited:
            self._limited.discard(node)
            self._machines.limit_memory(node, None)
            self._machines.limit_cores(node, None)

    def _note(self, process: str, what: str) -> int:
        node = self._node_of(process)
        if node not in self._limited:
            self._before[node, what] = int(self._machines.seen(node).get(what, 0))
            self._limited.add(node)
        return node

    def _since(self, process: str, what: str) -> int:
        node = self._node_of(process)
        if (node, what) not in self._before:
            return 0
        return max(0, int(self._machines.seen(node).get(what, 0)) - self._before[node, what])
