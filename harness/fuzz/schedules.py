"""Searches the recovery stack: random scenarios, played on the simulator or with real processes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainchaos.harness.fuzz.draw import draw
from trainchaos.harness.fuzz.draw.draw import Dice, Tree, World
from trainchaos.harness.fuzz.draw.shrink import smaller_than
from trainchaos.harness.fuzz.draw.stories import STORIES, Story, scenario_from_stories
from trainchaos.harness.fuzz.draw.text import as_file
from trainchaos.harness.fuzz.draw.variations import varied
from trainchaos.harness.fuzz.play.oracle import Find, find_in, headline, unsteady
from trainchaos.harness.fuzz.play.play import PlayResult, simulated
from trainchaos.harness.fuzz.search import Subject, Tried

NEAR = 0.35
"""Share of scenarios that vary one that reached something new."""
STORY = 0.8
"""Share of the others that follow a story; the faults of the rest are unrelated."""
KEPT = 200
"""How many scenarios that reached something new are kept for variations."""
TWICE = 10
"""One scenario of so many is played again, with the same seed."""
REAL_PLAYS, REAL_NEEDED, REAL_SMALLER = 3, 2, 15
"""Rules of ``Search`` where plays differ, and each takes many seconds."""


class ScenarioPlayer(Protocol):
    """Plays one scenario."""

    def play(self, tree: Mapping[str, Any]) -> PlayResult:
        """Play it; raises only what interrupts."""


@dataclass
class Schedules(Subject[Tree]):
    """Scenarios. ``stories``: those to draw; ``simulator``: with real processes,
    plays the same scenario for comparison; None: ``player`` is the simulator, and two plays that
    differ are a defect.
    """

    world: World
    player: ScenarioPlayer
    seed: str
    stories: Sequence[Story] = STORIES
    simulator: ScenarioPlayer | None = None
    _kept: list[Tree] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = Dice(rng=random.Random(f"chaos fuzz {self.seed}"))

    def attempt(self, number: int) -> Tried[Tree]:
        """One scenario; of ``TWICE`` one is played again."""
        tree = self._draw()
        played = self.player.play(tree)
        if played.refused:
            return Tried()
        find = find_in(tree, played)
        if find is None and (number + 1) % TWICE == 0:
            find = self._unsteady(tree, played)
        return Tried(case=tree, find=find, reached=played.reached)

    def keep(self, case: Tree) -> None:
        """For variations."""
        self._kept = [*self._kept[-KEPT + 1 :], case]

    def shows(self, case: Tree) -> Find | None:
        """A defect, or that two plays differ."""
        played = self.player.play(case)
        return find_in(case, played) or self._unsteady(case, played)

    def smaller(self, case: Tree) -> Iterator[Tree]:
        return smaller_than(case)

    def described(self, find: Find, case: Tree, how: str) -> Find:
        """With real processes, how often it showed, and what the simulator shows."""
        if self.simulator is None:
            return find
        launcher = case["launcher"]["kind"]
        where = f"{how} with launcher {launcher}, {self._beside(self.simulator, case, find.key)}"
        return Find(key=find.key, text=f"{where}: {headline(find)}\n{find.text}")

    def file(self, find: Find, case: Tree) -> tuple[str, str]:
        """The scenario, as ``chaos run`` takes it."""
        return as_file(case, find.key, headline(find))

    def _draw(self) -> Tree:
        if self._kept and self.dice.chance(NEAR):
            return varied(self.dice.rng.choice(self._kept), self.dice, self.world)
        if self.stories and self.dice.chance(STORY):
            return scenario_from_stories(self.dice, self.world, self.stories)
        return draw.scenario(self.dice, self.world)

    def _unsteady(self, tree: Tree, played: PlayResult) -> Find | None:
        if self.simulator is not None or played.refused:
            return None
        return unsteady(played, self.player.play(tree))

    def _beside(self, simulator: ScenarioPlayer, tree: Tree, key: str) -> str:
        """The result of the same scenario on the simulator."""
        twin = simulated(tree)
        played = simulator.play(twin)
        if played.refused:
            return "which the simulator refuses"
        found = find_in(twin, played)
        if found is None:
            return "green on the simulator"
        same = found.key == key
        return "the same on the simulator" if same else f"on the simulator {found.key!r}"
