"""Keeps an arm within its scenario's blast radius: checks every occurrence against the damage so
far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.schedule.blast import Damage, nodes_hit, ranks_hit, refusal
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.occurrence import LiveOccurrence


class Guard:
    """The guard of one arm; it must be notified when the job breaks and when it trains again."""

    def __init__(self, scene: Scene) -> None:
        scenario = scene.setup.cell.scenario
        self._scene = scene
        self._limits = scenario.blast_radius
        self._topology = scenario.topology
        self._recovering = False
        self._whole_since_ns = 0

    def on_failure(self) -> None:
        """A failure was declared."""
        self._recovering = True

    def on_training(self) -> None:
        """A generation trains: the job has recovered from all healed faults."""
        self._recovering = False
        self._whole_since_ns = self._scene.now_ns()

    def refusal(
        self, planned: PlannedFault, fault: Fault, struck: Sequence[LiveOccurrence]
    ) -> str | None:
        """Why an occurrence due now must not fire; None when it may."""
        active = [live for live in struck if not live.healed or self._is_being_answered(live)]
        stopped = set(self._ranks_of(live for live in active if _disables(live.fault)))
        held = {rank for rank in range(self._topology.ranks) if self._scene.process_of(rank)}
        occurrences = {(live.planned.id, live.occurrence.time_ns) for live in active}
        down = frozenset(
            node for live in active if _disables(live.fault) for node in live.planned.nodes
        )
        damage = Damage(
            active=len(occurrences), healthy=self._topology.whole(held - stopped), nodes=down
        )
        ranks = ranks_hit(planned, fault.where, self._topology)
        shards = self._topology.shards
        return refusal(
            self._limits,
            damage,
            ranks=ranks,
            disables=_disables(fault),
            shards=shards,
            nodes=nodes_hit(planned, fault.where, self._topology),
            whole=planned.nodes,
        )

    def _is_being_answered(self, live: LiveOccurrence) -> bool:
        """Whether the job is still recovering from it."""
        after = live.occurrence.time_ns >= self._whole_since_ns
        return self._recovering and after and not live.fault.harmless

    def _ranks_of(self, struck: Iterable[LiveOccurrence]) -> Iterable[int]:
        for live in struck:
            yield from ranks_hit(live.planned, live.fault.where, self._topology)


def _disables(fault: Fault) -> bool:
    """Whether the replicas that the fault hits stop being healthy."""
    return not fault.harmless and fault.where in (Where.PROCESS, Where.RANK, Where.NODE)
