"""Stories of faults that belong together: what they draw, and that nothing is drawn less
for them.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.search.fuzzed import assert_all_drawn, refusals
from trainchaos.chaos.fault.aftermath import Occurrence
from trainchaos.chaos.fault.base import Fault, Landed, Where
from trainchaos.harness.fuzz.draw.draw import Dice, Tree, World
from trainchaos.harness.fuzz.draw.stories import (
    MENDING,
    NEEDS,
    STORIES,
    Story,
    StoryFault,
    groups,
    scenario_from_stories,
)
from trainchaos.harness.fuzz.draw.text import as_yaml
from trainchaos.harness.fuzz.draw.variations import WAYS, varied
from trainchaos.harness.fuzz.play.play import PlayResult, kinds, strategies
from trainchaos.harness.fuzz.schedules import Schedules
from trainchaos.harness.fuzz.search import Search
from trainchaos.harness.fuzz.worker import world_of

WORLD = World(kinds=kinds(), strategies=strategies())
MOST_REFUSED = 0.5
EVENTS = {"noticed": "recovery_started"}
DIGEST = """
import hashlib, json, random
from trainchaos.harness.fuzz.draw.draw import Dice, World
from trainchaos.harness.fuzz.draw.stories import scenario_from_stories
from trainchaos.harness.fuzz.play.play import kinds, strategies
dice, world = Dice(rng=random.Random(1)), World(kinds=kinds(), strategies=strategies())
drawn = [scenario_from_stories(dice, world) for _ in range(50)]
print(hashlib.sha256(json.dumps(drawn).encode()).hexdigest())
"""


def trees(count: int, stories: Sequence[Story] = STORIES, world: World = WORLD) -> list[Tree]:
    dice = Dice(rng=random.Random(1))
    return [scenario_from_stories(dice, world, stories) for _ in range(count)]


def story(*faults: StoryFault, needs: tuple[str, ...] = ()) -> tuple[Story]:
    return (Story(name="a story", faults=faults, needs=needs),)


@pytest.mark.long
def test_one_seed_tells_the_same_whatever_the_process() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            cwd=Path(__file__).resolve().parents[3],
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


def test_every_story_is_told_and_names_what_there_is() -> None:
    there = {"same"}.union(*(groups(kind) for kind in kinds().values()))
    assert {word for one in STORIES for fault in one.faults for word in fault.what} <= there
    assert {need for one in STORIES for need in one.needs} <= set(NEEDS)
    said = {name for tree in trees(200) for name in tree["description"].split("; ")}
    assert said == {one.name for one in STORIES}


@pytest.mark.slow
@pytest.mark.parametrize("world", [WORLD, world_of("local")], ids=["sim", "local"])
def test_most_of_what_is_told_can_be_played(world: World, tmp_path: Path) -> None:
    refused = refusals(trees(40, world=world), tmp_path)
    assert len(refused) < MOST_REFUSED * 40, refused[:5]


@pytest.mark.parametrize("word", sorted(set(MENDING)))
def test_a_second_failure_strikes_while_the_first_is_mended(word: str) -> None:
    for tree in trees(
        20, story(StoryFault(what=("loss",)), StoryFault(what=("loss",), when=(word,)))
    ):
        first, second, *_ = tree["faults"]
        assert "step" in first["at"] and second["at"]["event"] == EVENTS.get(word, word)


def test_who_is_hit_stands_beside_who_was_hit_before() -> None:
    kill = {"process-kill": kinds()["process-kill"]}
    world = World(kinds=kill, strategies=strategies())
    for who, same in (("same", True), ("another", False)):
        met = 0
        for tree in trees(60, story(StoryFault(), StoryFault(when=("soon",), who=(who,))), world):
            first, second = (fault["target"].get("rank") for fault in tree["faults"][:2])
            if (
                first is not None
                and second is not None
                and "role" not in tree["faults"][1]["target"]
            ):
                met += 1
                assert (first == second) == same
        assert met > 10


def test_a_story_that_no_kind_can_tell_is_left_out() -> None:
    world = World(kinds={"process-kill": kinds()["process-kill"]}, strategies=strategies())
    said = {name for tree in trees(60, world=world) for name in tree["description"].split("; ")}
    assert "one failure after the other" in said and not any("supervis" in name for name in said)


class Vanishes(Fault):
    """A kind that somebody adds."""

    where = Where.RANK

    def act(self, target: Any) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def landed(self, occurrence: Occurrence, events: Sequence[Any]) -> Landed | None:
        """No."""
        return None


def test_a_new_kind_is_in_stories_by_what_it_says_of_itself() -> None:
    world = World(kinds={**kinds(), "vanishes": Vanishes}, strategies=strategies())
    assert "vanishes" in {
        fault["kind"] for tree in trees(300, world=world) for fault in tree["faults"]
    }


class Nowhere:
    """Plays nothing, and says that something new was reached now and then."""

    def __init__(self) -> None:
        self.trees: list[Mapping[str, Any]] = []

    def play(self, tree: Mapping[str, Any]) -> PlayResult:
        """Note it."""
        self.trees.append(tree)
        return PlayResult(reached=frozenset({("hit", str(len(self.trees) // 4))}))


def test_a_search_still_draws_every_feature_of_the_format() -> None:
    player = Nowhere()
    search = Search(Schedules(WORLD, player, "features"))
    while search.runs < 600:
        search.step()
    faults = [fault for tree in player.trees for fault in tree["faults"]]
    assert_all_drawn(player.trees)
    assert {fault["at"]["event"] for fault in faults if "event" in fault["at"]} >= {
        "data",
        "restore",
    }
    assert any("retrigger" in fault for fault in faults) and any(
        "description" not in t for t in player.trees
    )


def test_every_variation_is_made_and_leaves_its_scenario_alone() -> None:
    dice = Dice(rng=random.Random(3))
    for tree in trees(30):
        before = as_yaml(tree)
        made = [varied(tree, dice, WORLD) for _ in range(5)]
        assert any(one != tree for one in made) and as_yaml(tree) == before
    assert {way for axis, way in dice.seen if axis == "variation"} == set(WAYS)
