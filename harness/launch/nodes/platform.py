"""Where the nodes of a run come from, and what can be done to one as a whole: a container engine, a
batch system.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from chaos.fault.base import Need
from chaos.scenario.model import Cell
from harness.host.rundir import RunDirectory
from harness.launch.launcher import LinkControl, MachineControl
from harness.undo.base import Undo

Will = Callable[[Undo], str]
"""Writes an undo record to the run's ledger before the act; returns its id."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a run wants of its platform. ``nodes``: the most that any of its cells has, spare ones
    included; ``needs``: of all faults of all cells. The run's directory is the same on all nodes,
    under the same path.
    """

    run: RunDirectory
    cells: Sequence[Cell]
    nodes: int
    needs: frozenset[Need]
    will: Will


class Platform(Protocol):
    """The nodes of one run, kept from arm to arm. All names it gives away carry the run's id;
    everything it makes has its undo record before it exists.
    """

    @property
    def emulates(self) -> str:
        """What is not real here, for every report; empty: nothing."""

    host: str
    """An address of this machine that the agents of all nodes reach."""

    @property
    def machines(self) -> MachineControl | None:
        """Acts on nodes as a whole, where the platform can."""

    @property
    def links(self) -> LinkControl | None:
        """Shapes the network between nodes, where the platform can and the run's faults need it.
        Its links are named by nodes, in decimal; who is where is the cluster's to know.
        """

    def address(self, node: int) -> str:
        """Where ranks of a node listen, as those of others reach them: numeric; "": as its agent
        finds out, by the address from which it reaches the coordinator.
        """

    def start(self, node: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Have a node begin with an agent's ``command``, or begin anew once it is gone; returns
        before the agent has dialled. ``command`` begins with this process's Python, which a
        platform with another one replaces; ``environment``: what has to be in the agent's besides
        what the node has. Raises InfrastructureError, with what to do.
        """

    def replaceable(self, node: int) -> bool:
        """Whether a lost node can begin anew."""

    def gone(self, node: int) -> str | None:
        """Why a node is known to be gone, in words of the platform; None: as far as is known, it is
        there. Cheap: asked at every turn while an agent is silent.
        """

    def drain(self, node: int, reason: str) -> str | None:
        """Have the platform place nobody there any more, if the user allows it; what was done."""

    def close(self) -> Sequence[str]:
        """Remove everything; what could not be removed, for people."""
