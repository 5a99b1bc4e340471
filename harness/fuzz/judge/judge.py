"""The search for blind spots of the judge, in one process: draws a scenario that passes, changes
its logs, and shrinks changes that go unseen.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from trainchaos.harness.fuzz.draw import draw
from trainchaos.harness.fuzz.draw.draw import Dice, World
from trainchaos.harness.fuzz.draw.regressions import MOST_TEXT
from trainchaos.harness.fuzz.draw.shrink import shrunk
from trainchaos.harness.fuzz.draw.text import as_yaml, flow
from trainchaos.harness.fuzz.judge import changes as changing
from trainchaos.harness.fuzz.judge.bench import BaseRun, JudgeBench, base_of
from trainchaos.harness.fuzz.judge.lines import LogEdit
from trainchaos.harness.fuzz.play.coverage import Coverage
from trainchaos.harness.fuzz.play.oracle import Find
from trainchaos.harness.fuzz.play.play import SimPlayer

Tree = dict[str, Any]
ENDING = ".judge.yaml"
PER_BASE = 40
"""Changes of one run, before another is played."""
AGAIN = 0.3
"""Share of runs that are changed again, because they reached something new."""
KEPT = 20
WHOLE = 20
"""One of so many is judged whole."""
MOST_PLAYS = 40


@dataclass(frozen=True, kw_only=True)
class JudgeFind:
    """A find: the smallest scenario and changes that show it. ``plays``: how many runs it took to
    shrink it.
    """

    find: Find
    tree: Tree
    changes: tuple[LogEdit, ...]
    plays: int

    def files(self) -> Mapping[str, bytes]:
        """The one file that reproduces it."""
        words = (
            re.sub(r"[^a-z0-9]+", "-", self.changes[0].about)[:50].strip("-")
            if self.changes
            else "none"
        )
        name = f"{words}-{hashlib.blake2b(self.find.key.encode(), digest_size=3).hexdigest()}"
        return {
            f"{name}{ENDING}": written(self.tree, self.changes, self.find.text).encode(
                errors="replace"
            )
        }


def written(tree: Mapping[str, Any], changes: Sequence[LogEdit], text: str) -> str:
    """A scenario and changes of its logs as YAML."""
    lines = [f"showed: {flow(text[:MOST_TEXT])}", "changes:"]
    lines += [f"  - {flow(change.plain())}" for change in changes]
    lines += ["scenario:", *(f"  {line}" for line in as_yaml(tree).splitlines())]
    return "\n".join(lines) + "\n"


def replayed(path: Path, player: SimPlayer, bench: JudgeBench) -> Find | None:
    """The present find of a file; None if it shows nothing any more. A run that does not pass
    unchanged is reported as a find.
    """
    found = YAML(typ="safe", pure=True).load(path)
    played = player.play(found["scenario"])
    base = base_of(found["scenario"], played)
    if base is None:
        open_ones = [name for name, one in played.findings.items() if one.verdict != "pass"]
        text = played.refused or played.crash or ", ".join(open_ones)
        return Find(key="no base", text=f"the run does not pass as it is: {text}")
    if not found["changes"]:
        return bench.neutral(base)
    changes = [LogEdit.model_validate(change) for change in found["changes"]]
    looked = bench.look(base, changes, whole=True)
    if looked.same:
        return Find(key="no change", text="its changes change nothing")
    return looked.find


@dataclass(kw_only=True)
class JudgeSearch:
    """``runs``: changed logs that were judged; ``refused``: scenarios refused by the loader;
    ``unfit``: scenarios that did not pass.
    """

    world: World
    player: SimPlayer
    bench: JudgeBench
    seed: str
    coverage: Coverage = field(default_factory=Coverage)
    finds: dict[str, JudgeFind] = field(default_factory=dict)
    runs: int = 0
    refused: int = 0
    again: int = 0
    unfit: int = 0
    until_s: float = math.inf
    _kept: list[BaseRun] = field(default_factory=list)
    _base: BaseRun | None = None
    _left: int = 0
    _known: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.dice = Dice(rng=random.Random(f"chaos fuzz judge {self.seed}"))

    def step(self) -> JudgeFind | None:
        """Some changes of one run, or a new run to change; returns an unseen change, if it
        is new.
        """
        if self._base is None or self._left <= 0:
            self._base, self._left = self._another(), PER_BASE
            if self._base is None:
                return None
            alike = self.bench.neutral(self._base)
            if alike is not None:
                return self._new(alike, self._base, [])
        self._left -= 1
        base = self._base
        changes = changing.draw(self.dice, dict(base.logs))
        looked = self.bench.look(base, changes, whole=self.runs % WHOLE == WHOLE - 1)
        if looked.same:
            return None
        self.runs += 1
        if self.coverage.add(looked.reached) and not any(base is kept for kept in self._kept):
            self._kept = [*self._kept[-KEPT + 1 :], base]
        return self._new(looked.find, base, changes) if looked.find is not None else None

    def _another(self) -> BaseRun | None:
        if self._kept and self.dice.chance(AGAIN):
            return self.dice.rng.choice(self._kept)
        tree = draw.scenario(self.dice, self.world)
        played = self.player.play(tree)
        self.refused += bool(played.refused)
        base = base_of(tree, played)
        self.unfit += base is None and not played.refused
        return base

    def _new(self, find: Find, base: BaseRun, changes: Sequence[LogEdit]) -> JudgeFind | None:
        if find.key in self._known:
            self.again += 1
            return None
        self._known.add(find.key)
        few = self._fewer(find, base, changes)
        plays = 0

        def shows(tree: Tree) -> bool:
            if self._over():
                return False
            smaller = base_of(tree, self.player.play(tree))
            return smaller is not None and self._shows(find, smaller, few)

        small, plays = shrunk(base.tree, shows, MOST_PLAYS)
        last = base_of(small, self.player.play(small))
        said = None
        if last is not None:
            said = self.bench.look(last, few, whole=True).find if few else self.bench.neutral(last)
        found = JudgeFind(find=said or find, tree=small, changes=tuple(few), plays=plays)
        if found.find.key in self.finds:
            self.again += 1
            return None
        self.finds[found.find.key] = found
        return found

    def _fewer(self, find: Find, base: BaseRun, changes: Sequence[LogEdit]) -> list[LogEdit]:
        """Remove the changes that are not needed."""
        few = list(changes)
        for change in changes:
            rest = [one for one in few if one is not change]
            if rest and self._shows(find, base, rest):
                few = rest
        return few

    def _shows(self, find: Find, base: BaseRun, changes: Sequence[LogEdit]) -> bool:
        if self._over():
            return False
        found = self._found(find, base, changes)
        return found is not None and _kind(found) == _kind(find)

    def _over(self) -> bool:
        """Whether the time for shrinking is over."""
        return time.monotonic() >= self.until_s

    def _found(self, find: Find, base: BaseRun, changes: Sequence[LogEdit]) -> Find | None:
        if not changes:
            return self.bench.neutral(base)
        return self.bench.look(
            base, changes, whole=_kind(find).startswith(("crash", "not the"))
        ).find


def _kind(find: Find) -> str:
    """The find's key without the changes that led to it."""
    return find.key.partition(" by ")[0]
