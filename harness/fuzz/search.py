"""The search in one process: draws a scenario, plays it, and shrinks it if it shows a defect."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainchaos.harness.fuzz.draw import draw
from trainchaos.harness.fuzz.draw.draw import Dice, World
from trainchaos.harness.fuzz.draw.regressions import as_file
from trainchaos.harness.fuzz.draw.shrink import shrunk
from trainchaos.harness.fuzz.draw.stories import STORIES, Story, scenario_from_stories
from trainchaos.harness.fuzz.draw.variations import varied
from trainchaos.harness.fuzz.play.coverage import Coverage
from trainchaos.harness.fuzz.play.oracle import Find, find_in, unsteady
from trainchaos.harness.fuzz.play.play import PlayResult

Tree = dict[str, Any]

NEAR = 0.35
"""Share of scenarios that vary one that reached something new."""
STORY = 0.8
"""Share of the others that follow a story; the faults of the rest are unrelated."""
KEPT = 200
"""How many scenarios that reached something new are kept for variations."""
TWICE = 10
"""One scenario of so many is played again, with the same seed."""


class ReproducibleFind(Protocol):
    """A find of any search."""

    @property
    def find(self) -> Find:
        """The defect."""

    @property
    def plays(self) -> int:
        """How many plays it took to shrink it."""

    def files(self) -> Mapping[str, bytes]:
        """Name -> content of the files that reproduce it, the main file first."""


class DefectSearch(Protocol):
    """The search of one process, for any kind of find. ``runs``: tries; ``refused``: by the loader;
    ``again``: known finds that were seen again.
    """

    coverage: Coverage
    runs: int
    refused: int
    again: int

    def step(self) -> ReproducibleFind | None:
        """One try; returns its find, if that is new."""


class ScenarioPlayer(Protocol):
    """Plays one scenario."""

    def play(self, tree: Mapping[str, Any]) -> PlayResult:
        """Play it; raises only what interrupts."""


@dataclass(frozen=True, kw_only=True)
class ShrunkFind:
    """A defect, with the smallest scenario that shows it. ``first``: the scenario drawn; ``plays``:
    how many more it took; ``steady``: it shows again.
    """

    find: Find
    tree: Tree
    first: Tree
    plays: int
    steady: bool = True

    def files(self) -> Mapping[str, bytes]:
        """The scenario that shows it."""
        name, text = as_file(self.tree, self.find.key, self.find.text)
        return {name: text.encode(errors="replace")}


@dataclass(kw_only=True)
class Search:
    """Searches one scenario after the other. ``runs``: scenarios played, ``refused``: scenarios not
    played; ``finds``: by key; ``until_s``: monotonic time after which nothing is shrunk;
    ``stories``: the stories to draw.
    """

    world: World
    player: ScenarioPlayer
    seed: str
    stories: Sequence[Story] = STORIES
    coverage: Coverage = field(default_factory=Coverage)
    finds: dict[str, ShrunkFind] = field(default_factory=dict)
    runs: int = 0
    refused: int = 0
    again: int = 0
    until_s: float = math.inf
    _kept: list[Tree] = field(default_factory=list)
    _drawn: int = 0

    def __post_init__(self) -> None:
        self.dice = Dice(rng=random.Random(f"chaos fuzz {self.seed}"))

    def step(self) -> ShrunkFind | None:
        """One scenario; returns its find, if that is new."""
        tree = self._draw()
        played = self.player.play(tree)
        self._drawn += 1
        if played.refused:
            self.refused += 1
            return None
        self.runs += 1
        if self.coverage.add(played.reached):
            self._kept = [*self._kept[-KEPT + 1 :], tree]
        find = find_in(tree, played) or self._twice(tree, played)
        return self._new(find, tree) if find is not None else None

    def _draw(self) -> Tree:
        if self._kept and self.dice.chance(NEAR):
            return varied(self.dice.rng.choice(self._kept), self.dice, self.world)
        if self.stories and self.dice.chance(STORY):
            return scenario_from_stories(self.dice, self.world, self.stories)
        return draw.scenario(self.dice, self.world)

    def _twice(self, tree: Tree, played: PlayResult) -> Find | None:
        return unsteady(played, self.player.play(tree)) if self.runs % TWICE == 0 else None

    def _new(self, find: Find, tree: Tree) -> ShrunkFind | None:
        if find.key in self.finds:
            self.again += 1
            return None
        small, plays = shrunk(tree, lambda smaller: self._shows(smaller, find.key))
        found = ShrunkFind(find=self._said(small) or find, tree=small, first=tree, plays=plays)
        self.finds[find.key] = found
        return found

    def _shows(self, tree: Tree, key: str) -> bool:
        if time.monotonic() >= self.until_s:
            return False
        found = self._said(tree)
        return found is not None and found.key == key

    def _said(self, tree: Tree) -> Find | None:
        played = self.player.play(tree)
        return find_in(tree, played) or (
            None if played.refused else unsteady(played, self.player.play(tree))
        )
