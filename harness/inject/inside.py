"""Acts that the agents inside ranks do, as they are told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chaos.fault.base import Need
from harness.arm.fault_context import Scene
from harness.inject.occurrence import Act, command_of
from harness.inject.occurrences import Occurrences
from harness.inject.sites import Aim
from recovery.transport.wire import Extra


class InsideActs:
    """Of one arm. ``struck``: where their occurrences are kept; ``standing``: commands that hold
    for all who join, too.
    """

    def __init__(self, scene: Scene, struck: Occurrences) -> None:
        self._scene = scene
        self._struck = struck
        self.standing: list[dict[str, Any]] = []

    def do(self, act: Act, held: Mapping[int, str]) -> None:
        """Each of the ranks that hold acts: an occurrence each. ``held``: rank -> process."""
        for rank, process in sorted(held.items()):
            who = {"process": process, "rank": rank}
            groups = self._scene.groups if Need.CGROUP in act.fault.wants() else None
            undo = groups.undo(process) if groups is not None else ()
            aim = Aim(target=None, who=who, processes=(process,), rank=rank, undo=undo)
            self._send(process, command_of(self._struck.begin(act, aim)))

    def do_everywhere(self, act: Act, held: Mapping[int, str]) -> None:
        """One occurrence in all ranks. Those that do not hold hear of it when they are armed: they
        may have computed the step by then, so that what is chosen by step is chosen from the next.
        """
        names = tuple(process for _, process in sorted(held.items()))
        aim = Aim(target=None, who={"processes": list(names), "everywhere": True}, processes=names)
        there = {rank for rank in act.planned.ranks if self._scene.process_of(rank) is not None}
        ahead = 0 if there <= set(held) else 1
        command = command_of(self._struck.begin(act, aim), ahead=ahead)
        self.standing.append(command)
        for process in names:
            self._send(process, command)

    def _send(self, process: str, command: dict[str, Any]) -> None:
        self._scene.send(process, Extra(topic="go", payload=command))
