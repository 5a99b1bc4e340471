"""The search for files that the loader handles badly, in one process: draws a scenario, spoils it,
reads it, and shrinks what shows a defect.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainchaos.harness.fuzz.draw import draw
from trainchaos.harness.fuzz.draw.draw import Dice, World
from trainchaos.harness.fuzz.loader.reading import ReadResult, ScenarioReader, find_in
from trainchaos.harness.fuzz.loader.spoil import SpoiltFile, at, fresh, places, spoilt, text_of
from trainchaos.harness.fuzz.play.coverage import Coverage, Feature
from trainchaos.harness.fuzz.play.oracle import Find

ENDING = ".loader.yaml"
SAYS = ".loader.txt"
NEAR = 0.5
"""Share of files that are a spoilt file spoilt again: one that reached something new, or one that
loads.
"""
KEPT = 200
MOST_KEPT_BYTES = 50_000
"""Size limit of a file that is spoilt again: files of thousands of lines would only grow."""
TIMES = (1, 1, 1, 2, 3, 5)
MOST_READS = 200
MOST_SLOW_READS = 40
"""Limit of reads to shrink a file that takes seconds each time."""


@dataclass(frozen=True, kw_only=True)
class LoaderFind:
    """A find: the smallest file that shows it. ``plays``: how many were read to shrink it."""

    find: Find
    data: bytes
    how: tuple[str, ...]
    plays: int

    def files(self) -> Mapping[str, bytes]:
        """The file unchanged, and beside it the find's text: not every file has room for a
        comment.
        """
        digits = hashlib.blake2b(self.find.key.encode(), digest_size=3).hexdigest()
        words = re.sub(r"[^a-z0-9]+", "-", self.find.key.lower())[:50].strip("-")
        how = ", then ".join(self.how) or "nothing"
        said = f"Showed: {self.find.text}\nSpoilt by: {how}\n"
        return {
            f"{words}-{digits}{ENDING}": self.data,
            f"{words}-{digits}{SAYS}": said.encode(errors="replace"),
        }


def replayed(path: Path, reader: ScenarioReader) -> Find | None:
    """The present find of a file; None if it shows nothing any more."""
    return find_in(reader.read(path.read_bytes()))


def whole(dice: Dice, world: World) -> dict[str, Any]:
    """A scenario with additional parts that do not affect how it is played."""
    rng, tree = dice.rng, draw.scenario(dice, world)
    steps, ranks = tree["workload"]["steps"], tree["workload"]["ranks"]
    parts: dict[str, Any] = {
        "description": "what it is for",
        "tags": ["a", "b"],
        "vars": {"n": ranks, "text": "x"},
        "sla": {
            "recovery_time": ["median < 2s", {"check": "max < 5s", "severity": "warn"}],
            "goodput": ["min > 0.1"],
        },
        "invariants": dice.pick(
            "invariants", ("default", "observable", ["liveness"], {"leave_out": ["loss-equality"]})
        ),
        "steady_state": ["committed_steps >= 2 within 60s", {"check": "healthy_replicas >= 1"}],
        "blast_radius": {"max_concurrent_faults": 4, "protected_nodes": []},
        "requires": {"cores": 1, "root": False},
        "timeouts": {"hang": "2s", "park": 1.5},
        "repeat": rng.randint(1, 3),
        "baseline": "paired",
        "order": "sequential",
        "matrix": {"a": [1, 2], "b": ["x", {"strategy": "none"}], "exclude": [{"a": 1}]},
    }
    for name, value in parts.items():
        if dice.chance(0.25):
            tree[name] = value
    if "vars" in tree and dice.chance(0.5):
        tree["workload"]["ranks"] = "${vars.n}"
    if "matrix" in tree and dice.chance(0.5):
        tree["seed"] = "${matrix.a}"
    if tree["faults"] and dice.chance(0.3):
        tree["faults"][0]["expect"] = {"outcome": "recovered", "blame": "rank"}
        tree["faults"][0]["verify"] = {"signal": 9}
    if dice.chance(0.1):
        tree["workload"] = {
            "command": ["python", "train.py"],
            "ranks": ranks,
            "steps": steps,
            "progress": {"regex": r"step (?P<step>\d+)"},
        }
        tree["launcher"] = "local"
        del tree["recovery"]
    return tree


@dataclass(kw_only=True)
class LoaderSearch:
    """``runs``: files read; ``refused``: files refused, as most should be; ``until_s``: monotonic
    time after which nothing is shrunk.
    """

    world: World
    reader: ScenarioReader
    seed: str
    coverage: Coverage = field(default_factory=Coverage)
    finds: dict[str, LoaderFind] = field(default_factory=dict)
    runs: int = 0
    refused: int = 0
    again: int = 0
    until_s: float = math.inf
    _kept: list[SpoiltFile] = field(default_factory=list)
    _good: list[SpoiltFile] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = Dice(rng=random.Random(f"chaos fuzz loader {self.seed}"))

    def step(self) -> LoaderFind | None:
        """One file; returns its find, if that is new."""
        one = self._draw()
        read = self.reader.read(one.data)
        self.runs += 1
        self.refused += bool(read.said)
        if self.coverage.add(_reached(one, read)) and len(one.data) <= MOST_KEPT_BYTES:
            self._kept = [*self._kept[-KEPT + 1 :], one]
        if not read.said and len(one.data) <= MOST_KEPT_BYTES:
            self._good = [*self._good[-KEPT + 1 :], one]
        find = find_in(read)
        return self._new(find, one) if find is not None else None

    def _draw(self) -> SpoiltFile:
        if self._kept and self.dice.chance(NEAR):
            near = self._good if self._good and self.dice.chance(0.5) else self._kept
            return spoilt(self.dice.rng.choice(near), self.dice)
        one = fresh(whole(self.dice, self.world))
        for _ in range(self.dice.rng.choice(TIMES)):
            one = spoilt(one, self.dice)
        return one

    def _new(self, find: Find, one: SpoiltFile) -> LoaderFind | None:
        if find.key in self.finds:
            self.again += 1
            return None
        slow = find.key.startswith(("too", "crash: no end"))  # each read takes its whole time limit
        most = MOST_SLOW_READS if slow else MOST_READS

        def shows(data: bytes) -> bool:
            if time.monotonic() >= self.until_s:
                return False
            found = find_in(self.reader.read(data))
            return found is not None and found.key == find.key

        data, plays = one.data, 0
        if one.tree is not None:
            tree, plays = smallest(
                one.tree, lambda tree: shows(text_of(tree).encode()), most, smaller_trees
            )
            data = text_of(tree).encode()
        data, more = smallest(data, shows, most, smaller_texts)
        found = find_in(self.reader.read(data))
        self.finds[find.key] = LoaderFind(
            find=found or find, data=data, how=one.how, plays=plays + more
        )
        return self.finds[find.key]


def _reached(one: SpoiltFile, read: ReadResult) -> set[Feature]:
    last = one.how[-1] if one.how else "nothing"
    if not read.said:
        return {("loaded", *one.how[-2:])}
    heads = read.heads[:5]
    return {("refused", head) for head in heads} | {("spoilt", head, last) for head in heads}


# ---- shrinking


def smallest(
    one: Any, shows: Callable[[Any], bool], most: int, smaller_than: Callable[[Any], Iterator[Any]]
) -> tuple[Any, int]:
    """The smallest found, and how many candidates were tried."""
    asked, again = 0, True
    while again:
        again = False
        for smaller in smaller_than(one):
            if asked >= most:
                return one, asked
            asked += 1
            if shows(smaller):
                one, again = smaller, True
                break
    return one, asked


def smaller_trees(tree: Any) -> Iterator[Any]:
    """Trees with less content, largest steps first: values at the top removed, lists and texts
    halved, deeper values removed.
    """
    for path in sorted(places(tree), key=len):
        value = at(tree, path)
        if isinstance(value, (list, str)) and len(value) > 8:
            half = len(value) // 2
            yield _with(tree, path, value[:half])
            yield _with(tree, path, value[half:])
        yield _without(tree, path)


def smaller_texts(data: bytes) -> Iterator[bytes]:
    """Texts without some lines, large parts first; then lines without some of their bytes."""
    lines = data.splitlines(keepends=True)
    size = len(lines) // 2
    while size:
        for first in range(0, len(lines), size):
            yield b"".join([*lines[:first], *lines[first + size :]])
        size //= 2
    for number, line in enumerate(lines):
        for half in (line[: len(line) // 2] + line[-1:], line[len(line) // 2 :]):
            if len(line) > 8:
                yield b"".join([*lines[:number], half, *lines[number + 1 :]])


def _rebuilt(
    tree: Any, path: tuple[str | int, ...], change: Callable[[Any, str | int], None]
) -> Any:
    """A copy of the containers on the path; the rest is shared."""
    made = type(tree)(tree)
    if len(path) == 1:
        change(made, path[0])
    else:
        made[path[0]] = _rebuilt(tree[path[0]], path[1:], change)
    return made


def _with(tree: Any, path: tuple[str | int, ...], value: Any) -> Any:
    def put(holder: Any, key: str | int) -> None:
        holder[key] = value

    return _rebuilt(tree, path, put)


def _without(tree: Any, path: tuple[str | int, ...]) -> Any:
    def take(holder: Any, key: str | int) -> None:
        del holder[key]

    return _rebuilt(tree, path, take)
