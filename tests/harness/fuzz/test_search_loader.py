"""``chaos fuzz --what loader``: how files are spoilt, what is taken for a defect, and that planted
ones are found.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from trainchaos.chaos.cli import build_catalogue
from trainchaos.chaos.commands.fuzz import fuzz
from trainchaos.chaos.loading import checks
from trainchaos.chaos.source.diagnostics import Problem
from trainchaos.harness.fuzz.draw.draw import Dice, World
from trainchaos.harness.fuzz.loader import loader, reading
from trainchaos.harness.fuzz.loader.garble import OF_TEXTS
from trainchaos.harness.fuzz.loader.loader import (
    ENDING,
    SAYS,
    LoaderSearch,
    replayed,
    smaller_texts,
    smaller_trees,
    smallest,
    whole,
)
from trainchaos.harness.fuzz.loader.reading import (
    GOOD,
    MOST_CPU_S,
    MOST_GROWN,
    ReadResult,
    ScenarioReader,
    find_in,
)
from trainchaos.harness.fuzz.loader.spoil import OF_TREES, fresh, spoilt, text_of
from trainchaos.harness.fuzz.play.play import kinds, strategies

CATALOGUE = build_catalogue()
WORLD = World(kinds=kinds(), strategies=strategies())
READER = ScenarioReader(catalogue=CATALOGUE)
FOLDER = Path(__file__).resolve().parents[3] / "scenarios" / "regressions"
REGRESSIONS = sorted(FOLDER.glob(f"*{ENDING}"))
PATH = "/x/scenario.yaml"


def dice(seed: int = 1) -> Dice:
    return Dice(rng=random.Random(seed))


def search(seed: str = "test") -> LoaderSearch:
    return LoaderSearch(world=WORLD, reader=READER, seed=seed)


# ---- spoiling


def test_a_tree_is_written_as_yaml_that_reads_back() -> None:
    one = dice()
    for _ in range(20):
        tree = whole(one, WORLD)
        assert YAML(typ="safe", pure=True).load(text_of(tree)) == tree


def test_every_way_of_spoiling_is_tried_and_leaves_what_it_spoils_alone() -> None:
    one, seen = dice(), Counter[str]()
    for _ in range(150):
        before = fresh(whole(one, WORLD))
        kept = copy.deepcopy(before)
        after = spoilt(before, one)
        assert before == kept and after.how
        seen.update(after.how)
    assert set(seen) == {*OF_TREES, *OF_TEXTS}


@pytest.mark.slow
def test_most_of_what_is_not_spoilt_loads() -> None:
    one = dice()
    said = [READER.read(fresh(whole(one, WORLD)).data).said for _ in range(8)]
    assert sum(map(bool, said)) < 6, said


# ---- judging


def refused(*lines: str) -> ReadResult:
    return ReadResult(path=PATH, said="\n".join(lines))


ONE = "1 error; nothing was started"


@pytest.mark.parametrize(
    ("read", "key"),
    [
        (ReadResult(path=PATH), None),
        (
            refused(
                f"{PATH}:1:2: ranks must be at least 1, not 0", "  ranks: 0", "         ^", ONE
            ),
            None,
        ),
        (
            ReadResult(path=PATH, crash="Traceback", place="KeyError in a/b.py c"),
            "crash: KeyError in a/b.py c",
        ),
        (
            ReadResult(path=PATH, cautions=(f"{PATH}:1:2: warning: \x1b[2J",)),
            "characters that are not to be seen: scenario.yaml:#:#: warning: \x1b[#J",
        ),
        (ReadResult(path=PATH, warned="OddWarning: line 1"), "a warning of Python's: OddWarning"),
        (ReadResult(path=PATH, other="it differs"), "not the same twice: it differs"),
        (ReadResult(path=PATH, cpu_s=MOST_CPU_S + 0.1), "too slow: it loads"),
        (ReadResult(path=PATH, grown=MOST_GROWN + 1), "too much memory: it loads"),
        (
            refused(f"{PATH}:1:2: {'x' * 2000}", ONE),
            f"more than 2000 characters for an error: scenario.yaml:#:#: {'x' * 60}",
        ),
        (refused("ranks: 0 is wrong", ONE), "the file is not named: ranks: # is wrong"),
        (
            refused(f"{PATH}:1:2: \x1b[2J", ONE),
            "characters that are not to be seen: scenario.yaml:#:#: \x1b[#J",
        ),
        (
            refused(f"{PATH}:1:2: a", "b is wrong", ONE),
            "a line that is none of an error's: b is wrong",
        ),
    ],
)
def test_what_counts_as_a_defect(read: ReadResult, key: str | None) -> None:
    found = find_in(read)
    assert (found.key[:100] if found else None) == (key and key[:100])


def test_a_good_file_is_no_find_and_what_it_takes_is_measured() -> None:
    read = READER.read(GOOD)
    assert (read.said, find_in(read)) == ("", None)
    assert read.cpu_s > 0 and 0 <= read.grown < MOST_GROWN


def test_a_file_that_is_read_in_two_ways_is_a_find(monkeypatch: pytest.MonkeyPatch) -> None:
    count = iter(range(1000))

    def moody(faults: Any) -> Iterator[Problem]:
        yield Problem(("faults",), "odd" if next(count) % 2 else "even")

    monkeypatch.setattr(checks, "_repeated_ids", moody)
    found = find_in(READER.read(GOOD))
    assert found is not None and found.key.startswith("not the same twice")


@pytest.mark.slow
def test_memory_that_is_taken_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(faults: Any) -> list[Problem]:
        return [Problem(("faults",), str(len(b"x" * (MOST_GROWN + (64 << 20)))))]

    monkeypatch.setattr(checks, "_repeated_ids", greedy)
    found = find_in(READER.read(GOOD))
    assert found is not None and found.key.startswith("too much memory"), found


# ---- making small


def test_a_tree_is_made_small() -> None:
    tree = {"a": [{"id": n, "x": {"y": 1}} for n in range(3000)], "b": {"c": "z" * 5000}, "d": 1}
    small, asked = smallest(tree, lambda one: bool(one.get("a")), 100, smaller_trees)
    assert small == {"a": [{}]} and asked <= 100
    assert len(tree["a"]) == 3000 and tree["a"][0] == {"id": 0, "x": {"y": 1}}  # type: ignore[index, arg-type]


def test_a_text_is_made_small() -> None:
    data = (
        b"".join(b"line %d\n" % number for number in range(400)) + b"wrong: " + b"y" * 300 + b"\n"
    )
    small, asked = smallest(data, lambda one: b"wrong" in one, 200, smaller_texts)
    assert b"wrong" in small and len(small) < 20 and asked <= 200


# ---- finding


def found_within(most: int, seed: str = "planted") -> Mapping[str, Any]:
    one = search(seed)
    for _ in range(most):
        if one.step() is not None:
            break
    return one.finds


@pytest.mark.slow
@pytest.mark.parametrize("most", [12, pytest.param(40, marks=pytest.mark.long)])
def test_what_is_right_shows_nothing(most: int) -> None:
    one = search()
    for _ in range(most):
        one.step()
    assert {key: found.find.text for key, found in one.finds.items()} == {}
    assert one.runs == most and one.refused > most / 4 and one.coverage.rows()


def test_one_seed_searches_the_same_again() -> None:
    first, second = search(), search()
    for _ in range(5):
        first.step()
        second.step()
    assert first.coverage.times == second.coverage.times


@pytest.mark.long
@pytest.mark.slow
def test_a_check_that_raises_is_found_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    right = checks._repeated_ids

    def careless(faults: list[Any]) -> Iterator[Problem]:
        for fault in faults:
            fault["kind"].lower()
        return right(faults)

    monkeypatch.setattr(checks, "_repeated_ids", careless)
    (found,) = found_within(120).values()
    assert found.find.key.startswith("crash: ") and "careless" in found.find.key
    assert len(found.data) < 200, found.data


@pytest.mark.long
@pytest.mark.slow
def test_a_check_that_takes_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def quadratic(faults: list[Any]) -> Iterator[Problem]:
        yield from ()
        for _ in range(len(faults) ** 2):
            sum(range(20_000))

    monkeypatch.setattr(checks, "_repeated_ids", quadratic)
    monkeypatch.setattr(loader, "MOST_SLOW_READS", 0)
    monkeypatch.setattr(reading, "MOST_CPU_S", 0.3)
    monkeypatch.setattr(reading, "GIVEN_UP_S", 1.0)
    (found,) = found_within(400).values()
    assert found.find.key.startswith(("too slow", "crash: no end"))


@pytest.mark.slow
def test_a_find_is_kept_as_it_is_and_says_what_it_showed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(faults: list[Any]) -> list[Problem]:
        raise KeyError("x")

    with monkeypatch.context() as patched:
        patched.setattr(checks, "_repeated_ids", broken)
        (found,) = found_within(5).values()
        files = found.files()
        names = sorted(files)
        assert [name.endswith(end) for name, end in zip(names, (SAYS, ENDING), strict=True)] == [
            True,
            True,
        ]
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        again = replayed(tmp_path / names[1], READER)
        assert again is not None and again.key == found.find.key
    assert b"KeyError" in files[names[0]] and replayed(tmp_path / names[1], READER) is None


@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_was_found_once_is_mended(path: Path) -> None:
    assert path.with_name(path.name.replace(ENDING, SAYS)).read_text().startswith("Showed: ")
    found = replayed(path, READER)
    assert found is None, found.text


def test_a_strategy_is_refused_where_nothing_is_played() -> None:
    result = CliRunner().invoke(
        fuzz, ["--what", "loader", "--strategy", "hot-spare"], standalone_mode=False
    )
    assert "leave it out" in str(result.exception)
