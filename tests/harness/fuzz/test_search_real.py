"""``chaos fuzz --real``: what counts as found where nothing is the same twice, and what is drawn
for it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.search.fuzzed import fails
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import load
from trainchaos.harness.fuzz.draw import draw
from trainchaos.harness.fuzz.draw.draw import Dice
from trainchaos.harness.fuzz.draw.text import as_yaml
from trainchaos.harness.fuzz.play.play import PlayResult
from trainchaos.harness.fuzz.schedules import REAL_NEEDED, REAL_PLAYS, REAL_SMALLER, Schedules
from trainchaos.harness.fuzz.search import MOST_ONCE, Search, ShrunkFind
from trainchaos.harness.fuzz.worker import WorkerStopped, world_of
from trainchaos.harness.fuzz.workers import UNSTEADY, SearchTally

CATALOGUE = build_catalogue()
GOOD = PlayResult()
TWICE = "w3 commits 12 twice"
BAD, OTHER = fails(TWICE), fails("nobody knows rank 2")
KEY = "faulted: membership fail: P commits # twice"
OTHER_KEY = "faulted: membership fail: nobody knows rank #"


class Plays:
    """Plays by what it is told: a row of results, the last again and again; or a function of the
    scenario.
    """

    def __init__(
        self, *row: PlayResult, by: Callable[[draw.Tree], PlayResult] | None = None
    ) -> None:
        self.row, self.by = row, by
        self.trees: list[Any] = []

    def play(self, tree: Mapping[str, Any]) -> PlayResult:
        self.trees.append(tree)
        return self.by(dict(tree)) if self.by else self.row[min(len(self.trees), len(self.row)) - 1]


class Searched:
    """A search with what it told."""

    def __init__(
        self, player: Plays, simulator: Plays | None = None, until_s: float = math.inf
    ) -> None:
        self.player, self.simulator = player, simulator or Plays(GOOD)
        self.told: list[ShrunkFind[draw.Tree]] = []
        subject = Schedules(world_of("local"), player, "x", simulator=self.simulator)
        self.search = Search(
            subject,
            tell=self.told.append,
            until_s=until_s,
            plays=REAL_PLAYS,
            needed=REAL_NEEDED,
            most_smaller=REAL_SMALLER,
        )

    def step(self) -> ShrunkFind[draw.Tree] | None:
        return self.search.step()


# ---- twice of three


@pytest.mark.parametrize(
    ("row", "key", "how"),
    [
        ((BAD, BAD, GOOD), KEY, "2 of 2 plays"),
        ((BAD, GOOD, BAD, GOOD), KEY, "2 of 3 plays"),
        ((BAD, OTHER, OTHER, GOOD), OTHER_KEY, "2 of 3 plays"),
    ],
)
def test_what_shows_twice_in_three_plays_is_found(
    row: tuple[PlayResult, ...], key: str, how: str
) -> None:
    searched = Searched(Plays(*row))
    found = searched.step()
    assert found is not None and (found.find.key, found.steady) == (key, True)
    assert found.find.text.startswith(f"{how} with launcher local, green on the simulator: ")
    assert list(searched.search.finds) == [key]


@pytest.mark.parametrize("row", [(BAD, GOOD), (BAD, OTHER, GOOD)])
def test_what_shows_once_is_told_and_no_find(row: tuple[PlayResult, ...]) -> None:
    searched = Searched(Plays(*row))
    assert searched.step() is None and not searched.search.finds
    (once,) = searched.told
    assert (once.find.key, once.steady, len(searched.player.trees)) == (KEY, False, 3)
    assert once.find.text.startswith("seen once in 3 with launcher local")


def test_what_was_looked_for_in_vain_is_not_looked_for_for_ever() -> None:
    searched = Searched(Plays(*(BAD, GOOD, GOOD) * (MOST_ONCE + 3)))
    for _ in range(MOST_ONCE):
        searched.step()
    before = len(searched.player.trees)
    searched.step()
    assert len(searched.player.trees) == before + 1


@pytest.mark.parametrize(
    ("simulated", "said"),
    [
        (GOOD, "green on the simulator"),
        (BAD, "the same on the simulator"),
        (OTHER, f"on the simulator {OTHER_KEY!r}"),
        (PlayResult(refused="no"), "which the simulator refuses"),
    ],
)
def test_each_find_is_set_beside_the_simulator(simulated: PlayResult, said: str) -> None:
    searched = Searched(Plays(BAD, BAD, GOOD), Plays(simulated))
    found = searched.step()
    assert found is not None and f", {said}: faulted: membership fail" in found.find.text
    assert {tree["launcher"]["kind"] for tree in searched.simulator.trees} == {"sim"}
    assert found.case["launcher"]["kind"] == "local"


def test_it_is_told_before_it_is_made_small_with_few_plays() -> None:
    searched = Searched(Plays(BAD))
    found = searched.step()
    assert found is not None and searched.told[0].case == found.first != found.case
    assert len(searched.player.trees) <= 2 + REAL_SMALLER + 1


def test_a_smaller_one_that_does_not_show_it_again_is_not_taken() -> None:
    shown: list[draw.Tree] = []

    def by(tree: draw.Tree) -> PlayResult:
        first = not shown or tree == shown[0] or tree not in shown
        shown.append(tree)
        return BAD if first else GOOD

    found = Searched(Plays(by=by)).step()
    assert found is not None and found.case == found.first


def test_nothing_is_made_smaller_when_the_time_is_over() -> None:
    searched = Searched(Plays(BAD), until_s=0.0)
    assert searched.step() is not None and len(searched.player.trees) == 2


def test_whoever_is_told_to_end_tells_what_was_seen() -> None:
    seen = []

    def by(tree: draw.Tree) -> PlayResult:
        if seen:
            raise WorkerStopped
        seen.append(tree)
        return BAD

    searched = Searched(Plays(by=by))
    with pytest.raises(WorkerStopped):
        searched.step()
    assert [(one.find.key, one.steady) for one in searched.told] == [(KEY, False)]


def test_a_find_of_a_real_run_says_so_in_its_file(tmp_path: Path) -> None:
    found = Searched(Plays(BAD, BAD, GOOD)).step()
    assert found is not None and found.name.startswith("local-")
    said = 'description: "Showed: 2 of 2 plays with launcher local, green on the simulator'
    assert said in found.text


def test_files_follow_what_is_told(tmp_path: Path) -> None:
    tally = SearchTally(into=tmp_path, tell=lambda said: None)
    message = {"find": KEY, "name": "a.yaml", "text": "first", "steady": False}
    tally.hear(0, message)
    assert [path.parent for path in tmp_path.rglob("*.yaml")] == [tmp_path / UNSTEADY]
    tally.hear(1, {**message, "steady": True})
    (first,) = tmp_path.rglob("*.yaml")
    assert first.parent == tmp_path
    smaller = {**message, "name": "b.yaml", "steady": True}
    tally.hear(2, smaller)  # another worker found the same: the first is kept
    assert list(tmp_path.rglob("*.yaml")) == [first]
    tally.hear(1, smaller)
    (small,) = tmp_path.rglob("*.yaml")
    assert small != first and tally.finds == {KEY: small} and not tally.once


# ---- drawing


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "agents"])
def test_what_is_drawn_for_real_is_small_and_much_of_it_loads(
    tmp_path: Path, launcher: str
) -> None:
    one, refused = Dice(rng=random.Random(1)), []
    world = world_of(launcher)
    for number in range(30):
        tree = draw.scenario(one, world)
        job = tree["workload"]
        assert (
            tree["launcher"]["kind"] == launcher and job["ranks"] <= 4 and 20 <= job["steps"] <= 60
        )
        assert all(
            value <= 2
            for f in tree["faults"]
            for key, value in f.get("params", {}).items()
            if key == "hold_s"
        )
        (tmp_path / f"{number}.yaml").write_text(as_yaml(tree))
        try:
            assert len(load(tmp_path / f"{number}.yaml", CATALOGUE).cells) == 1
        except ScenarioError as error:
            refused.append(str(error))
    assert len(refused) < 20, refused[:5]


def test_a_launcher_and_real_runs_go_together(tmp_path: Path) -> None:
    from trainchaos.chaos.cli import invoke

    assert invoke(["fuzz", "--launcher", "agents", "--into", str(tmp_path)]) == 2
    assert invoke(["fuzz", "--real", "--what", "judge", "--into", str(tmp_path)]) == 2
