"""Damage is never guilt: whatever is lost, doubled, cut, zeroed or moved of any actor's lines, of
any kind, leaves open what needs that file, by its name, and accuses nobody.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.mutations.bases import ARMS, base, evidence_of
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import ORCHESTRATOR, read_log
from trainchaos.chaos.events.writer import EventWriter
from trainchaos.harness.fuzz.damage import (
    ENDING,
    WAYS,
    Damage,
    Damages,
    misjudged,
    places,
    replayed,
)
from trainchaos.harness.fuzz.draw.draw import World
from trainchaos.harness.fuzz.play.play import SimPlayer, kinds, strategies
from trainchaos.harness.fuzz.search import Search
from trainchaos.harness.judge.checkers import check_all
from trainchaos.harness.judge.record.whole import broken

BASES = ("hot-spare", "checkpoint-restart", "memory", "nan", "rot", "takeover", "agents", "script")
FOUND = Path(__file__).resolve().parents[3] / "scenarios" / "regressions"


def _write(folder: Path, arm: Mapping[str, tuple[Event, ...]], damage: Damage) -> Path:
    folder.mkdir()
    for name, events in arm.items():
        data = "".join(f"{event.to_line()}\n" for event in events).encode()
        (folder / f"{name}.jsonl").write_bytes(damage.done(data) if name == damage.actor else data)
    return folder


def _all(name: str) -> Iterator[Damage]:
    """For each actor's role and kind one line, drawn, and each way."""
    rng, made = random.Random(name), base(name)
    for arm in ARMS:
        events = getattr(made, arm)
        log = evidence_of(name, arm).log
        for kind in Kind:
            for supervisor in (True, False):
                lines = [
                    (actor, place)
                    for actor in sorted(events)
                    if (actor == ORCHESTRATOR) == supervisor
                    for place, event in enumerate(events[actor])
                    if event.kind is kind
                ]
                for way in WAYS if lines else ():
                    actor, line = rng.choice(lines)
                    if line in places(log, actor, way):
                        yield Damage(arm=arm, actor=actor, way=way, line=line)


CASES = [(name, damage) for name in BASES for damage in _all(name)]


@pytest.mark.sample(60)
@pytest.mark.parametrize(("name", "damage"), CASES, ids=str)
def test_damage_accuses_nobody(name: str, damage: Damage, memory: Path) -> None:
    events = getattr(base(name), damage.arm)
    log = read_log(_write(memory / "arm", events, damage))
    assert any(f"{damage.actor}.jsonl" in why for why in broken(log).values())
    try:
        findings = check_all(evidence_of(name, damage.arm, log))
    except (LogError, ValueError, LookupError):
        return  # there is no history of it: such an arm is left out, and its reason names the file
    assert misjudged(findings, damage.actor) == ""


def test_every_kind_of_event_is_damaged() -> None:
    hit = {getattr(base(n), d.arm)[d.actor][d.line].kind for n, d in CASES}
    assert len(hit) >= 40
    assert {damage.way for _, damage in CASES} == set(WAYS)


def test_a_damaged_run_is_inconclusive_and_has_no_figures(memory: Path) -> None:
    player = SimPlayer(catalogue=build_catalogue(), root=memory)
    world = World(kinds=kinds(), strategies=strategies(), strategy="hot-spare")
    search = Search(Damages(world, player, "a test"))
    while search.runs < 12:
        assert search.step() is None, search.finds


def test_a_judge_that_takes_damage_for_guilt_is_found(
    memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = SimPlayer(catalogue=build_catalogue(), root=memory)
    world = World(kinds=kinds(), strategies=strategies(), strategy="hot-spare")
    monkeypatch.setattr("trainchaos.harness.judge.checkers.broken", lambda log: {})
    search = Search(Damages(world, player, "a test"))
    found = None
    while found is None and search.runs < 40:
        found = search.step()
    assert found is not None
    (memory / found.name).write_text(found.text)
    assert replayed(memory / found.name, player) == found.find
    monkeypatch.undo()
    assert replayed(memory / found.name, player) is None


@pytest.mark.parametrize("path", sorted(FOUND.glob(f"*{ENDING}")), ids=lambda path: path.stem)
def test_damage_that_was_taken_for_guilt_is_seen_as_such(path: Path, memory: Path) -> None:
    assert replayed(path, SimPlayer(catalogue=build_catalogue(), root=memory)) is None


@pytest.mark.parametrize(
    ("wrote", "ready", "found"), [(-1, False, False), (3, False, True), (-1, True, True)]
)
def test_who_was_ended_before_its_first_line_lost_none(
    wrote: int, ready: bool, found: bool, memory: Path
) -> None:
    """A spare that is just begun as the job is done; one that was ready had written some."""
    writer = EventWriter(memory, ORCHESTRATOR, time.monotonic_ns)
    writer.write(Kind.ACTOR_STARTED, pid=1, host="h", wall_ns=time.time_ns())
    if ready:
        writer.write(Kind.PROCESS_READY, process="s1")
    writer.write(
        Kind.PROCESS_EXITED,
        process="s1",
        pid=2,
        exit_code=None,
        signal=9,
        expected=True,
        last_seq=wrote,
    )
    writer.write(Kind.ACTOR_ENDED)
    writer.close()
    (memory / "s1.jsonl").touch()
    assert ("s1" in broken(read_log(memory))) == found
