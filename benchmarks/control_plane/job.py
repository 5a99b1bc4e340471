"""The simulated job whose ranks the simulated agents pretend to have."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from trainchaos.recovery.transport.wire import Join

if TYPE_CHECKING:
    from benchmarks.control_plane.agents import SimulatedAgent as Agent


@dataclass
class Order:
    """When an order of one kind and generation reached agents, seconds: the first and the last of
    them, and how many.
    """

    first_s: float
    last_s: float
    nodes: set[int] = field(default_factory=set)


class SimulatedJob:
    """The ranks of all agents, which train in lock-step: ``step_s`` seconds a step, from the moment
    at which all members of a generation know of it, until one of them is lost.
    """

    def __init__(self, *, step_s: float, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._step_s, self._clock_s = step_s, clock_s
        self.generation = self.world = 0
        self.members: dict[int, tuple[Agent, str]] = {}
        self._base, self._since_s = 0, -1.0
        self.orders: dict[tuple[str, int], Order] = {}

    @property
    def trains(self) -> bool:
        """Whether a generation is whole and makes steps."""
        return self._since_s >= 0

    @property
    def committed(self) -> int:
        """The newest step that all ranks have committed."""
        if not self.trains:
            return self._base
        return self._base + int((self._clock_s() - self._since_s) / self._step_s)

    def halt(self) -> None:
        """A rank is lost, or the generation aborted: nobody makes another step."""
        self._base, self._since_s = self.committed, -1.0

    def told(self, kind: str, generation: int, node: int) -> None:
        """An order reached the agent of a node."""
        now_s = self._clock_s()
        order = self.orders.setdefault((kind, generation), Order(first_s=now_s, last_s=now_s))
        if node not in order.nodes:
            order.last_s = now_s
            order.nodes.add(node)

    def join(self, agent: Agent, process: str, order: Join) -> None:
        """A rank was told to join a generation."""
        if order.generation > self.generation:
            self.halt()
            self.generation, self.world, self.members = order.generation, order.world, {}
        if order.generation == self.generation:
            self.members[order.rank] = (agent, process)
            if len(self.members) == self.world:
                self._since_s = self._clock_s()

    def lose(self, agents: set[int]) -> list[tuple[Agent, str]]:
        """The ranks of these nodes are gone: the others stand still, and those whose ring
        neighbours they were see a broken connection. Returns the latter.
        """
        self.halt()
        ranks = sorted(self.members)
        gone = {rank for rank in ranks if self.members[rank][0].node in agents}
        beside = {
            (rank + way) % self.world for rank in gone for way in (-1, 1) if self.world
        } - gone
        return [self.members[rank] for rank in sorted(beside)]


@dataclass
class Counted:
    """What all agents have sent and received so far."""

    messages_out: int = 0
    messages_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
