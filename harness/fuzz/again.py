"""The search with real processes: results vary, so a find is played again and compared with the
simulator.

A find counts if it shows in at least two of three plays. One that shows once is kept apart, for
people: a race is a defect too, but then nothing can show whether a smaller scenario still has it,
or whether a change has fixed it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from trainchaos.harness.fuzz.draw.shrink import shrunk
from trainchaos.harness.fuzz.play.oracle import Find, find_in
from trainchaos.harness.fuzz.play.play import PlayResult, simulated
from trainchaos.harness.fuzz.search import ScenarioPlayer, Search, ShrunkFind, Tree

PLAYS = 3
NEEDED = 2
MOST_SMALLER = 15
"""Most plays on the way to a small scenario, since each takes many seconds."""
MOST_ONCE = 2
"""How often a find is investigated that did not show again before."""


@dataclass(kw_only=True)
class RealSearch(Search):
    """``simulator``: plays the same scenario there; ``tell``: called with finds before they are
    shrunk, and with those seen once; ``once``: find -> how often it did not show again.
    """

    simulator: ScenarioPlayer
    tell: Callable[[ShrunkFind], None]
    once: Counter[str] = field(default_factory=Counter)

    def _twice(self, tree: Tree, played: PlayResult) -> Find | None:
        return None

    def _said(self, tree: Tree) -> Find | None:
        return find_in(tree, self.player.play(tree))

    def _new(self, find: Find, tree: Tree) -> ShrunkFind | None:
        if find.key in self.finds or self.once[find.key] >= MOST_ONCE:
            self.again += 1
            return None
        seen, plays = {find.key: find}, 1
        times = Counter({find.key: 1})
        try:
            while plays < PLAYS and max(times.values()) < NEEDED:
                said = self._said(tree)
                plays += 1
                if said is not None:
                    seen.setdefault(said.key, said)
                    times[said.key] += 1
        except BaseException:  # interrupted: still write down what was seen
            self.tell(self._found(find, tree, tree, times=1, plays=plays, steady=False))
            raise
        ((key, most), *_) = times.most_common()
        if key in self.finds:
            self.again += 1
            return None
        if most < NEEDED:
            self.once[find.key] += 1
            self.tell(self._found(find, tree, tree, times=1, plays=plays, steady=False))
            return None
        return self._made_small(seen[key], tree, most, plays)

    def _made_small(self, find: Find, tree: Tree, times: int, plays: int) -> ShrunkFind:
        found = self._found(find, tree, tree, times=times, plays=plays)
        self.finds[find.key] = found
        self.tell(found)
        small, more = shrunk(
            tree, lambda smaller: self._shows(smaller, find.key), most=MOST_SMALLER
        )
        if small != tree and any(self._shows(small, find.key) for _ in range(PLAYS - 1)):
            found = self._found(find, small, tree, times=NEEDED, plays=plays + more)
            self.finds[find.key] = found
        return found

    def _found(
        self, find: Find, tree: Tree, first: Tree, *, times: int, plays: int, steady: bool = True
    ) -> ShrunkFind:
        how = f"{times} of {min(plays, PLAYS)} plays" if steady else f"seen once in {plays}"
        where = f"{how} with launcher {tree['launcher']['kind']}, {self._beside(tree, find.key)}"
        lines = find.text.splitlines() or [find.key]
        lead = lines[-1] if find.text.startswith("Traceback") else lines[0]
        text = f"{where}: {lead}\n{find.text}"
        return ShrunkFind(
            find=Find(key=find.key, text=text), tree=tree, first=first, plays=plays, steady=steady
        )

    def _beside(self, tree: Tree, key: str) -> str:
        """The result of the same scenario on the simulator."""
        twin = simulated(tree)
        played = self.simulator.play(twin)
        if played.refused:
            return "which the simulator refuses"
        found = find_in(twin, played)
        if found is None:
            return "green on the simulator"
        return (
            "the same on the simulator" if found.key == key else f"on the simulator {found.key!r}"
        )
