"""Acts that are done from outside the ranks, on the targets that a site finds."""

from __future__ import annotations

from trainchaos.chaos.fault.base import Fault, Where
from trainchaos.chaos.schedule.plan import PlannedFault
from trainchaos.harness.arm.fault_context import Scene
from trainchaos.harness.inject.occurrence import Act
from trainchaos.harness.inject.occurrences import Occurrences
from trainchaos.harness.inject.sites import MissingTarget, OccurrenceTarget, Site, site
from trainchaos.harness.inject.sites.process import miss_rank


class OutsideActs:
    """Acts from outside the ranks of one arm. ``struck``: keeps their occurrences."""

    def __init__(self, scene: Scene, struck: Occurrences) -> None:
        self._scene = scene
        self._struck = struck
        self._sites: dict[Where, Site] = {}

    def reachable(self, planned: PlannedFault, fault: Fault) -> bool:
        """Whether every target of the fault is there."""
        return self._site(fault.where).reachable(planned)

    def do(self, act: Act) -> bool:
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
