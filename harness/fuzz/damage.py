"""The search for damage of a record that the judge takes for something else, in one process: draws
a scenario that passes, damages one of its logs, and judges it.

Damage is never guilt, and never innocence: the verdict has to be inconclusive and name the file,
and no finding of that arm may fail, or pass by lines of that file.
"""

from __future__ import annotations

import hashlib
import math
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ruamel.yaml import YAML

from trainchaos.chaos.events.log import ORCHESTRATOR, Log
from trainchaos.harness.fuzz.draw import draw
from trainchaos.harness.fuzz.draw.draw import Dice, World
from trainchaos.harness.fuzz.draw.text import as_yaml, flow
from trainchaos.harness.fuzz.play.coverage import Coverage
from trainchaos.harness.fuzz.play.oracle import Find
from trainchaos.harness.fuzz.play.play import (
    ARMS,
    PlayResult,
    SimPlayer,
    bounded,
    memory,
    place_of,
    resolved_of,
    traceback_tail,
)
from trainchaos.harness.host.rundir import RunDirectory, arm_id, write_resolved
from trainchaos.harness.judge.checkers import OF_SUPERVISOR
from trainchaos.harness.judge.record.nodes import silenced
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.judge.verdict.judge import judge

ENDING = ".damage.yaml"
PER_RUN = 40
"""Logs that are damaged of one run, before another is played."""
LONGEST_S = 60.0
Lines = Sequence[bytes]
WAYS: Mapping[str, Callable[[Lines, int], bytes]] = MappingProxyType(
    {
        "lost": lambda lines, n: b"".join([*lines[:n], *lines[n + 1 :]]),
        "doubled": lambda lines, n: b"".join([*lines[: n + 1], *lines[n:]]),
        "cut": lambda lines, n: b"".join(lines[:n]) + lines[n][: len(lines[n]) // 2],
        "ended": lambda lines, n: b"".join(lines[:n]),
        "zeroed": lambda lines, n: (
            b"".join(lines[:n]) + bytes(len(lines[n])) + b"".join(lines[n + 1 :])
        ),
        "torn": lambda lines, n: b"".join([*lines[:n], lines[n][:20] + b"\n", *lines[n + 1 :]]),
        "exchanged": lambda lines, n: b"".join(
            [*lines[:n], *lines[n : n + 2][::-1], *lines[n + 2 :]]
        ),
        "a key twice": lambda lines, n: b"".join(
            [
                *lines[:n],
                lines[n].replace(b'"data":{', b'"data":{"rank":0,"rank":1,', 1),
                *lines[n + 1 :],
            ]
        ),
    }
)
"""Ways to damage the n-th line of a log."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What is done to a log. ``line``: from 0."""

    arm: Literal["control", "faulted"]
    actor: str
    way: str
    line: int

    def done(self, data: bytes) -> bytes:
        """The damaged file. Raises KeyError for an unknown way."""
        return WAYS[self.way](data.splitlines(keepends=True), self.line)


@dataclass(frozen=True, kw_only=True)
class DamageFind:
    """A find: a scenario, and damage of its run that was not seen for what it is."""

    find: Find
    tree: Mapping[str, Any]
    damage: Damage
    plays: int = 1

    def files(self) -> Mapping[str, bytes]:
        """The one file that reproduces it."""
        lines = [
            f"showed: {flow(self.find.text)}",
            f"damage: {flow(vars(self.damage))}",
            "scenario:",
        ]
        lines += [f"  {line}" for line in as_yaml(self.tree).splitlines()]
        name = hashlib.blake2b(self.find.key.encode(), digest_size=3).hexdigest()
        return {
            f"{self.damage.way.replace(' ', '-')}-{name}{ENDING}": "\n".join([*lines, ""]).encode()
        }


def replayed(path: Path, player: SimPlayer) -> Find | None:
    """The present find of a file; None if it shows nothing any more."""
    found = YAML(typ="safe", pure=True).load(path)
    return look(player.play(found["scenario"]), Damage(**found["damage"]))


def look(played: PlayResult, damage: Damage) -> Find | None:
    """What is wrong with the judgement of a run that passes, damaged so; None: nothing."""
    assert played.cell is not None
    root = Path(tempfile.mkdtemp(prefix="damage-", dir=memory()))
    try:
        run = RunDirectory(root / "run")
        run.root.mkdir()
        write_resolved(run, resolved_of(played.cell))
        for arm in ARMS:
            folder = run.events(arm_id(played.cell.id, 0, arm))
            folder.mkdir(parents=True)
            for name, actor in played.logs[arm].actors.items():
                data = "".join(f"{event.to_line()}\n" for event in actor.events).encode()
                hit = (arm, name) == (damage.arm, damage.actor)
                (folder / f"{name}.jsonl").write_bytes(damage.done(data) if hit else data)
        with bounded(LONGEST_S, "damaged"):
            results = judge(run)
    except Exception as error:
        return Find(key=f"crash: {place_of(error)}", text=traceback_tail(error))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if results.verdict != "inconclusive":
        return _find(damage, f"the verdict is {results.verdict}: {results.reason}")
    mine = next((one for one in results.arms if one.arm == damage.arm), None)
    wrong = misjudged(mine.invariants if mine is not None else {}, damage.actor)
    if not wrong and mine is None and f"{damage.actor}.jsonl" not in results.reason:
        wrong = f"the file is not named: {results.reason}"
    return _find(damage, wrong) if wrong else None


def misjudged(findings: Mapping[str, Finding], actor: str) -> str:
    """Which finding of an arm accuses, or acquits, though the record of ``actor`` is damaged; ""
    if none does, and one names the file.
    """
    for name, finding in findings.items():
        alone = name in OF_SUPERVISOR and actor != ORCHESTRATOR
        if finding.verdict == "fail" or (finding.verdict == "pass" and not alone):
            return f"{name} {finding.verdict}: {finding.witness}"
    named = any(f"{actor}.jsonl" in finding.witness for finding in findings.values())
    return "" if named or not findings else "no finding names the file"


def places(log: Log, actor: str, way: str) -> list[int]:
    """The lines of an actor that can be damaged so. Of one lost with its node, the end is open."""
    count = len(log.actors[actor].events)
    if way in ("ended", "cut", "lost") and actor in silenced(log):
        return []
    return list(range(count - 1 if way == "exchanged" else count))


def _find(damage: Damage, text: str) -> Find:
    return Find(key=f"{damage.way}: {text.partition(':')[0]}", text=text)


@dataclass(kw_only=True)
class DamageSearch:
    """``runs``: damaged runs that were judged; ``refused``: scenarios refused by the loader."""

    world: World
    player: SimPlayer
    seed: str
    coverage: Coverage = field(default_factory=Coverage)
    finds: dict[str, DamageFind] = field(default_factory=dict)
    runs: int = 0
    refused: int = 0
    again: int = 0
    until_s: float = math.inf
    _tree: Mapping[str, Any] = field(default_factory=dict)
    _played: PlayResult | None = None
    _left: int = 0

    def __post_init__(self) -> None:
        self.dice = Dice(rng=random.Random(f"chaos fuzz judge {self.seed}"))

    def step(self) -> DamageFind | None:
        """One damaged run, or another run to damage; returns its find, if that is new."""
        if self._played is None or self._left <= 0:
            self._play()
            return None
        self._left -= 1
        rng = self.dice.rng
        arm, way = rng.choice(ARMS), rng.choice(list(WAYS))
        log = self._played.logs[arm]
        actor = rng.choice(sorted(log.actors))
        lines = places(log, actor, way)
        if not lines:
            return None
        damage = Damage(arm=arm, actor=actor, way=way, line=rng.choice(lines))
        self.runs += 1
        self.coverage.add(frozenset({("damage", way, log.actors[actor].kinds[damage.line].value)}))
        found = look(self._played, damage)
        if found is None:
            return None
        if found.key in self.finds:
            self.again += 1
            return None
        self.finds[found.key] = DamageFind(find=found, tree=self._tree, damage=damage)
        return self.finds[found.key]

    def _play(self) -> None:
        self._tree = draw.scenario(self.dice, self.world)
        played = self.player.play(self._tree)
        self.refused += bool(played.refused)
        passes = played.cell is not None and not played.left and not played.crash
        passes = passes and all(found.verdict == "pass" for found in played.findings.values())
        self._played, self._left = (played if passes else None), PER_RUN
