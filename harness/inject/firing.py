"""How a fault that is due acts: in ranks, by their agents, or from outside, on what sites find."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from chaos.fault.base import Fault, Need, Where
from chaos.schedule.plan import PlannedFault, Point
from harness.arm.fault_context import Scene
from harness.inject.guard import Guard
from harness.inject.occurrence import Late, Live, command_of, to_hold_at, widened
from harness.inject.occurrences import Occurrences
from harness.inject.sites import Aim, Miss, Site, site
from harness.inject.sites.process import miss_rank
from recovery.transport.wire import Extra


class Firing:
    """The part of an injector that arms ranks and acts; ``harness.inject.injector`` says when."""

    def __init__(
        self, scene: Scene, plan: tuple[PlannedFault, ...], kinds: Mapping[str, type[Fault]]
    ) -> None:
        self._scene = scene
        if any(kinds[planned.kind].everywhere for planned in plan):
            plan = widened(plan, kinds, scene.setup.cell.scenario.workload.ranks)
        self._standing: list[dict[str, Any]] = []  # commands that hold for whoever joins, too
        self._plan = {planned.id: planned for planned in plan}
        self._faults = {planned.id: kinds[planned.kind](**planned.params) for planned in plan}
        self._all = plan
        self._ranks = range(scene.setup.cell.scenario.topology.ranks)
        self._sites: dict[Where, Site] = {}
        self._guard = Guard(scene)
        self._struck = Occurrences(scene)
        # by (fault, point), and by (fault, point, rank) for a fault that only the ranks it hits
        # hold for
        self._fired: Counter[Any] = Counter()
        self._waiting: set[tuple[str, int]] = set()  # (fault, rank): due, but no step was named
        # (fault, rank) still to be hit -> the act it is of
        self._acts: dict[tuple[str, int], int] = {}
        self._committed = 0

    def arm(self, process: str, rank: int) -> None:
        """Tell a process that is about to take ``rank``, or has it, where it has to hold; it holds
        where it does.
        """
        points = to_hold_at(
            self._all, self._faults, rank, self._fired, self._waiting, self._struck.live
        )
        if self._plan:
            self._scene.send(
                process, Extra(topic="arm", payload={"points": points, "standing": self._standing})
            )
        self._struck.joined(process)

    def _point(self, planned: PlannedFault, point: Point) -> Point:
        return point[0], self._faults[planned.id].point(point[1])

    def _site(self, where: Where) -> Site:
        if where not in self._sites:
            self._sites[where] = site(where, self._scene)
        return self._sites[where]

    def _reachable(self, planned: PlannedFault) -> bool:
        where = self._faults[planned.id].where
        if where is Where.RANK:
            return all(self._scene.process_of(rank) for rank in planned.ranks)
        return self._site(where).reachable(planned)

    def _fire_unheld(self, planned: PlannedFault, late: Late | None = None) -> None:
        """Fire at targets none of which holds."""
        if self._refused(planned, None):
            return
        if self._faults[planned.id].where is not Where.RANK:
            self._fire_outside(planned, None, late=late)
            return
        act = self._struck.next_number(planned)
        for rank in planned.ranks:
            self._acts[planned.id, rank] = act
            # Only its training thread can act, at the next step: whoever holds the rank is told to
            # hold there.
            self._waiting.add((planned.id, rank))
            process = self._scene.process_of(rank)
            if process:
                self.arm(process, rank)

    def _fire_in_ranks(
        self, planned: PlannedFault, held: Mapping[int, str], at: Point, point: Point | None
    ) -> None:
        """Have the agents in the ranks act, if the fault is theirs to do; else act on them from
        outside. ``at``: where they hold; ``point``: the planned one, None where no step was named.
        """
        if self._faults[planned.id].where is not Where.RANK:
            hit = dataclasses.replace(planned, ranks=tuple(held), spares=())
            self._fire_outside(hit, at, point=point, held=True)
            for process in held.values():
                self._release(planned, process)
            return
        if self._faults[planned.id].everywhere:
            self._fire_everywhere(planned, held, at)
            return
        act = self._act_of(planned, held)
        for rank, process in sorted(held.items()):
            who = {"process": process, "rank": rank}
            groups = self._scene.groups if Need.CGROUP in self._faults[planned.id].wants() else None
            undo = groups.undo(process) if groups is not None else ()
            aim = Aim(target=None, who=who, processes=(process,), rank=rank, undo=undo)
            live = self._begin(planned, aim, at, point=point, held=True, act=act)
            self._scene.send(process, Extra(topic="go", payload=command_of(planned, live, at[0])))

    def _fire_everywhere(self, planned: PlannedFault, held: Mapping[int, str], at: Point) -> None:
        """One occurrence in all ranks; those that do not hold hear of it when they are
        armed anew.
        """
        names = tuple(process for _, process in sorted(held.items()))
        aim = Aim(target=None, who={"processes": list(names), "everywhere": True}, processes=names)
        command = command_of(planned, self._begin(planned, aim, at), at[0])
        self._standing.append(command)
        self._waiting -= {(planned.id, rank) for rank in planned.ranks}
        for process in names:
            self._scene.send(process, Extra(topic="go", payload=command))
        self._arm_all(but=held)

    def _arm_all(self, but: Iterable[int] = ()) -> None:
        for rank in self._ranks:
            process = self._scene.process_of(rank)
            if process and rank not in but:
                self.arm(process, rank)

    def _refused(self, planned: PlannedFault, step: int | None) -> bool:
        """Whether the blast radius forbids an occurrence that is due; it is then recorded as
        failed.
        """
        reason = self._guard.refusal(planned, self._faults[planned.id], self._struck.live)
        if reason is not None:
            self._struck.not_fired(planned, step, reason)
        return reason is not None

    def _act_of(self, planned: PlannedFault, ranks: Iterable[int]) -> int:
        """The act that hits these ranks: one that began with others and waits for them, or a new
        one.
        """
        waited = [
            act for rank in ranks if (act := self._acts.pop((planned.id, rank), None)) is not None
        ]
        return min(waited, default=self._struck.next_number(planned))

    def _begin(self, planned: PlannedFault, aim: Aim | Miss, at: Point | None, **more: Any) -> Live:
        step, phase = at or (None, None)
        committed = self._committed if step is None else step - 1
        return self._struck.begin(
            planned, self._faults[planned.id], aim, step, committed=committed, phase=phase, **more
        )

    def _fire_outside(self, planned: PlannedFault, at: Point | None, **more: Any) -> None:
        """Act from outside on all that it aims at; whoever is to hold for its end hears of it
        before it goes on. ``at``: where ranks hold for it, None where none does.
        """
        fault = self._faults[planned.id]
        aims: Sequence[Aim | Miss] = self._site(fault.where).aims(
            planned, fault, self._struck.next_number(planned)
        )
        ends, act = False, self._act_of(planned, planned.ranks)
        for aim in aims or [miss_rank(-1)]:
            live = self._begin(planned, aim, at, act=act, **more)
            if isinstance(aim, Miss):
                self._struck.fail(live, aim.reason)
                continue
            try:
                done = dict(fault.act(aim.target))
            except Exception as error:
                self._struck.fail(live, f"it could not act: {type(error).__name__}: {error}")
                self._struck.heal(live, "what it had done before it failed is undone")
                continue
            ends = ends or live.ends_at is not None
            if done:
                self._struck.effect(live, done)
            # At once: whoever hears of it next may kill the process.
            self._struck.look(live)
        if ends:
            self._arm_all()

    def _release(self, planned: PlannedFault, process: str) -> None:
        self._scene.send(process, Extra(topic="go", payload={"act": False, "fault": planned.id}))
