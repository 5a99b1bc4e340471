"""What a platform does to nodes, for those who know processes: where a process is, is the cluster's
to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chaos.fault.targets import LinkShape
from harness.launch.launcher import LinkControl, MachineControl
from harness.undo.base import Undo

NodeOf = Callable[[str], int]
"""The node of a process that was started at some time. Raises KeyError."""


class LinksByNode:
    """Links between processes are those between their nodes; implements
    ``harness.launch.launcher.LinkControl``.
    """

    def __init__(self, links: LinkControl, node_of: NodeOf) -> None:
        self._links = links
        self._node_of = node_of

    def refuses(self, link: tuple[str, str]) -> str | None:
        """See ``LinkControl``."""
        return self._links.refuses(self.over(link))

    def over(self, link: tuple[str, str]) -> tuple[str, str]:
        """The one of their nodes."""
        return str(self._node_of(link[0])), str(self._node_of(link[1]))

    def shape(self, links: Sequence[tuple[str, str]], shape: LinkShape) -> str:
        """Those between different nodes; a node's ranks share them."""
        between = list(dict.fromkeys(map(self.over, links)))
        return self._links.shape([link for link in between if not self._links.refuses(link)], shape)

    def probe(self, link: tuple[str, str]) -> int:
        """See ``LinkControl``."""
        return self._links.probe(self.over(link))

    def probed(self, number: int) -> Mapping[str, Any] | None:
        """See ``LinkControl``."""
        return self._links.probed(number)


class GroupsByNode:
    """Limits on a process are limits on all of its node; implements
    ``harness.launch.launcher.GroupControl``. They go with the node, so that nothing has to be
    undone once it is gone.
    """

    def __init__(self, machines: MachineControl, node_of: NodeOf) -> None:
        self._machines = machines
        self._node_of = node_of
        self._before: dict[tuple[int, str], int] = {}  # counts of a node when its limit was set
        self._limited: set[int] = set()

    def undo(self, process: str) -> Sequence[Undo]:
        """None: see above."""
        return ()

    def limit_memory(self, process: str, mib: int) -> None:
        """Of its node."""
        node = self._note(process, "oom_kills")
        self._machines.limit_memory(node, mib)

    def oom_kills(self, process: str) -> int:
        """On its node, since the limit was set."""
        return self._since(process, "oom_kills")

    def limit_cores(self, processes: Sequence[str], cores: float) -> None:
        """Of their nodes, each."""
        for node in dict.fromkeys(self._note(process, "throttled") for process in processes):
            self._machines.limit_cores(node, cores)

    def throttled(self, process: str) -> int:
        """Periods of its node, since the limit was set."""
        return self._since(process, "throttled")

    def release(self, process: str) -> None:
        """No limit any more on its node."""
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
