"""Where the nodes of a run come from, and acts on whole nodes: a container engine, a batch
system.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import LinkControl, MachineControl
from trainchaos.harness.undo.base import Undo

Will = Callable[[Undo], str]
"""Writes an undo record to the run's ledger before the act; returns its id."""


@dataclass(frozen=True, kw_only=True)
class PlatformNeeds:
    """What a run needs of its platform. ``nodes``: the maximum over its cells, including spare
    nodes; ``needs``: of all faults of all cells. The run's directory is shared by all nodes, under
    the same path.
    """

    run: RunDirectory
    cells: Sequence[Cell]
    nodes: int
    needs: frozenset[Need]
    will: Will


class Platform(ABC):
    """The nodes of one run, kept from arm to arm. All its names contain the run's id; everything it
    makes has its undo record before it exists.
    """

    emulates: str = ""
    """What is emulated here, for every report; empty if everything is real."""

    host: str
    """An address of this machine that the agents of all nodes can reach."""

    machines: MachineControl | None = None
    """Acts on nodes as a whole, where the platform can."""

    links: LinkControl | None = None
    """Shapes the network between nodes, where the platform can and the run's faults need it. Links
    are named by nodes, in decimal; the cluster maps processes to nodes.
    """

    def address(self, node: int) -> str:
        """Numeric address at which ranks of a node listen for ranks of other nodes. "" if the agent
        must find it: it uses its own address on the connection to the coordinator.
        """
        return ""

    @abstractmethod
    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a node with an agent's ``command``, or restart it after it is gone; returns before
        the agent has connected. ``command`` starts with this process's Python, which a platform
        with another Python replaces; ``environment``: variables that the agent needs besides the
        node's own. Raises InfrastructureError, with a hint.
        """

    def replaceable(self, node: int) -> bool:
        """Whether a lost node can be started anew."""
        return True

    @abstractmethod
    def gone(self, node: int) -> str | None:
        """Why a node is known to be gone, in the platform's words; None if it is there as far as is
        known. Must be cheap: polled continuously while an agent is silent. TakenAway where it was
        ended from outside.
        """

    def drain(self, node: int, reason: str) -> str | None:
        """Make the platform place no more work there, if the user allows it; returns what
        was done.
        """
        return None

    @abstractmethod
    def close(self) -> Sequence[str]:
        """Remove everything; returns messages for what could not be removed."""


class FewActs:
    """Acts on nodes where a platform can end one and little else: the rest is refused, and lifting
    a limit is nothing. Base of such a ``harness.launch.launcher.MachineControl``.
    """

    can_pause = False
    who = ""
    """Who cannot do it, for the refusals."""

    def pause(self, node: int) -> None:
        """Refused."""
        raise self._unable("stop a node")

    def resume(self, node: int) -> None:
        """Nothing to undo."""

    def limit_memory(self, node: int, spare_mib: int | None) -> None:
        """Refused."""
        if spare_mib is not None:
            raise self._unable("limit a node's memory")

    def limit_cores(self, node: int, cores: float | None) -> None:
        """Refused."""
        if cores is not None:
            raise self._unable("limit a node's processor time")

    def isolate(self, node: int, *, outward: bool = True, inward: bool = True) -> None:
        """Refused."""
        raise self._unable("cut a node off")

    def rejoin(self, node: int) -> None:
        """Nothing to undo."""

    def _unable(self, what: str) -> OSError:
        return OSError(errno.EOPNOTSUPP, f"{self.who} cannot {what}")
