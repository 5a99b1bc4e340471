"""Acts that the agents inside ranks do on command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.fault.base import Need
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.occurrence import Act, command_of
from trainchaos.harness.inject.occurrences import Occurrences
from trainchaos.harness.inject.sites import OccurrenceTarget
from trainchaos.recovery.transport.wire import Extra


class InsideActs:
    """Acts inside the ranks of one arm. ``struck``: keeps their occurrences; ``standing``: commands
    that every process that joins later must follow too.
    """

    def __init__(self, scene: Scene, struck: Occurrences) -> None:
        self._scene = scene
        self._struck = struck
        self.standing: list[dict[str, Any]] = []

    def do(self, act: Act, held: Mapping[int, str]) -> None:
        """Make each rank that holds act, one occurrence per rank. ``held``: rank -> process."""
        for rank, process in sorted(held.items()):
            who = {"process": process, "rank": rank}
            groups = self._scene.surface.groups if Need.CGROUP in act.fault.wants() else None
            undo = groups.undo(process) if groups is not None else ()
            aim = OccurrenceTarget(target=None, who=who, processes=(process,), rank=rank, undo=undo)
            self._send(process, command_of(self._struck.begin(act, aim)))

    def do_everywhere(self, act: Act, held: Mapping[int, str]) -> None:
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
