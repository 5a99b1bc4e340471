"""Acts of faults: from outside the ranks on the targets that a site finds, and inside ranks, by
their agents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.fault.base import Fault, Need, Where
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.occurrences import Act, Occurrences, command_of
from trainchaos.harness.inject.sites import MissingTarget, OccurrenceTarget, Site, miss_rank, site
from trainchaos.recovery.transport.wire import Extra


class Acts:
    """Acts in one arm. ``struck``: keeps their occurrences; ``standing``: commands that every
    process that joins later must follow too.
    """

    def __init__(self, scene: Scene, struck: Occurrences) -> None:
        self._scene = scene
        self._struck = struck
        self._sites: dict[Where, Site] = {}
        self.standing: list[dict[str, Any]] = []

    def reachable(self, planned: PlannedFault, fault: Fault) -> bool:
        """Whether every target of the fault is there."""
        if fault.where is Where.RANK:
            return all(self._scene.process_of(rank) for rank in planned.ranks)
        return self._site(fault.where).reachable(planned)

    def from_outside(self, act: Act) -> bool:
        """Act on every target. Returns whether ranks must hold for its end."""
        first = self._struck.next_number(act.planned)
        aims = self._site(act.fault.where).aims(act.planned, act.fault, first)
        return any([self._strike(act, aim) for aim in aims or [miss_rank(-1)]])

    def _strike(self, act: Act, aim: OccurrenceTarget | MissingTarget) -> bool:
        """Act on one target. Returns whether ranks must hold for its end."""
        live = self._struck.begin(act, aim)
        if isinstance(aim, MissingTarget):
            self._struck.fail(live, aim.reason)
            return False
        try:
            done = dict(act.fault.act(aim.target))
        except Exception as error:
            self._struck.fail(live, f"it could not act: {type(error).__name__}: {error}")
            self._struck.heal(live, "what it had done before it failed is undone")
            return False
        if done:
            self._struck.effect(live, done)
        # Look at once: the next process to learn of the act may kill the target.
        self._struck.look(live)
        return live.ends_at is not None

    def _site(self, where: Where) -> Site:
        if where not in self._sites:
            self._sites[where] = site(where, self._scene)
        return self._sites[where]

    def in_ranks(self, act: Act, held: Mapping[int, str]) -> None:
        """Make each rank that holds act, one occurrence per rank. ``held``: rank -> process."""
        for rank, process in sorted(held.items()):
            who = {"process": process, "rank": rank}
            groups = self._scene.surface.groups if Need.CGROUP in act.fault.wants() else None
            undo = groups.undo(process) if groups is not None else ()
            aim = OccurrenceTarget(target=None, who=who, processes=(process,), rank=rank, undo=undo)
            self._send(process, command_of(self._struck.begin(act, aim)))

    def everywhere(self, act: Act, held: Mapping[int, str]) -> None:
        """One occurrence in all ranks. Ranks that do not hold get the command when they are armed;
        they may have computed the step already, so a choice made by step starts at the next step.
        """
        names = tuple(process for _, process in sorted(held.items()))
        aim = OccurrenceTarget(
            target=None, who={"processes": list(names), "everywhere": True}, processes=names
        )
        there = {rank for rank in act.planned.ranks if self._scene.process_of(rank) is not None}
        ahead = 0 if there <= set(held) else 1
        command = command_of(self._struck.begin(act, aim), ahead=ahead)
        self.standing.append(command)
        for process in names:
            self._send(process, command)

    def _send(self, process: str, command: dict[str, Any]) -> None:
        self._scene.send(process, Extra(topic="go", payload=command))
