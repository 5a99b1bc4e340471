"""Searches the judge for damage of a record that it takes for something else: draws a scenario that
passes, damages one of its logs, and judges it.

Damage is never guilt, and never innocence: the verdict has to be inconclusive and name the file,
and no finding of that arm may fail, or pass by lines of that file.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from ruamel.yaml import YAML

from trainchaos.chaos.events.log import ORCHESTRATOR, Log
from trainchaos.harness.fuzz.draw import draw
from trainchaos.harness.fuzz.draw.draw import Dice, Tree, World
from trainchaos.harness.fuzz.draw.text import as_yaml, flow, short
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
from trainchaos.harness.fuzz.search import Subject, Tried
from trainchaos.harness.host.rundir import RunDirectory, arm_id, write_resolved
from trainchaos.harness.judge.checkers import OF_SUPERVISOR
from trainchaos.harness.judge.record.nodes import silenced
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.judge.verdict.judge import judge

ENDING = ".damage.yaml"
PER_RUN = 40
"""Logs that are damaged of one run, before another is played."""
LONGEST_S = 60.0
Lines = list[bytes]
WAYS: Mapping[str, Callable[[bytes, Lines], Lines]] = MappingProxyType(
    {
        "lost": lambda line, after: after,
        "doubled": lambda line, after: [line, line, *after],
        "cut": lambda line, after: [line[: len(line) // 2]],
        "ended": lambda line, after: [],
        "zeroed": lambda line, after: [bytes(len(line)), *after],
        "torn": lambda line, after: [line[:20] + b"\n", *after],
        "exchanged": lambda line, after: [*after[:1], line, *after[1:]],
        "a key twice": lambda line, after: [
            line.replace(b'"data":{', b'"data":{"rank":0,"rank":1,', 1),
            *after,
        ],
    }
)
"""Ways to damage a line of a log: what is there instead of it and of those after it."""


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What is done to a log. ``line``: from 0."""

    arm: Literal["control", "faulted"]
    actor: str
    way: str
    line: int

    def done(self, data: bytes) -> bytes:
        """The damaged file. Raises KeyError for an unknown way."""
        lines = data.splitlines(keepends=True)
        instead = WAYS[self.way](lines[self.line], lines[self.line + 1 :])
        return b"".join([*lines[: self.line], *instead])


@dataclass(frozen=True, kw_only=True)
class DamagedRun:
    """A scenario that passes, and damage of its run. ``played``: the run."""

    tree: Tree
    damage: Damage
    played: PlayResult


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
    mine = next((one for one in results.arms if one.arm == damage.arm), None)
    if results.verdict != "inconclusive":
        wrong = f"the verdict is {results.verdict}: {results.reason}"
    elif mine is not None:
        wrong = misjudged(mine.invariants, damage.actor)
    else:
        named = f"{damage.actor}.jsonl" in results.reason
        wrong = "" if named else f"the file is not named: {results.reason}"
    return Find(key=f"{damage.way}: {wrong.partition(':')[0]}", text=wrong) if wrong else None


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


class Damages(Subject[DamagedRun]):
    """Damaged runs: many of each drawn scenario that passes."""

    def __init__(self, world: World, player: SimPlayer, seed: str) -> None:
        self._dice = Dice(rng=random.Random(f"chaos fuzz judge {seed}"))
        self._tries = self._drawn(world, player)

    def attempt(self, number: int) -> Tried[DamagedRun] | None:
        """One damaged run, or another run to damage."""
        return next(self._tries)

    def shows(self, case: DamagedRun) -> Find | None:
        """What the judge says wrongly of it."""
        return look(case.played, case.damage)

    def file(self, find: Find, case: DamagedRun) -> tuple[str, str]:
        """The scenario with the damage."""
        head = f"showed: {flow(find.text)}\ndamage: {flow(vars(case.damage))}\nscenario:\n"
        name = f"{case.damage.way.replace(' ', '-')}-{short(find.key)}{ENDING}"
        return name, head + textwrap.indent(as_yaml(case.tree), "  ")

    def _drawn(self, world: World, player: SimPlayer) -> Iterator[Tried[DamagedRun] | None]:
        while True:
            tree = draw.scenario(self._dice, world)
            played = player.play(tree)
            yield Tried() if played.refused else None
            passes = played.cell is not None and not played.left and not played.crash
            if passes and all(found.verdict == "pass" for found in played.findings.values()):
                for _ in range(PER_RUN):
                    yield self._damaged(tree, played)

    def _damaged(self, tree: Tree, played: PlayResult) -> Tried[DamagedRun] | None:
        rng = self._dice.rng
        arm, way = rng.choice(ARMS), rng.choice(list(WAYS))
        log = played.logs[arm]
        actor = rng.choice(sorted(log.actors))
        lines = places(log, actor, way)
        if not lines:
            return None
        damage = Damage(arm=arm, actor=actor, way=way, line=rng.choice(lines))
        reached = {("damage", way, log.actors[actor].kinds[damage.line].value)}
        case = DamagedRun(tree=tree, damage=damage, played=played)
        return Tried(case=case, find=self.shows(case), reached=reached)
