"""Two faults of one kind at once on one thing: what they do lasts until the later one is over, and
no longer.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.harness.launch.nodes.test_machines import FakeScene
from tests.support.search.simulate import Played, cell_of, play
from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.arm.in_force import ActiveEffects
from trainchaos.harness.inject.sites.link import link_aim

LINK = {"link": {"src": 1}}
SLOW: dict[str, dict[str, Any]] = {
    "node-slow": {"params": {"cores": 2}, "target": {"node": 0}},
    "straggler": {"params": {"factor": 3}, "target": {"rank": 1}},
    "data-stall": {"params": {"delay_s": 0.05}, "target": {"rank": 1}},
    "link-delay": {"params": {"delay_ms": 20}, "target": LINK},
    "link-loss": {"params": {"percent": 50}, "target": LINK},
    "link-throttle": {"params": {"mbit_per_s": 40}, "target": LINK},
}
FIRST, LAST = 21, 27
"""Steps that the second alone makes slow."""


def twice(folder: Path, kind: str, **more: Any) -> Played:
    """Of steps 9 to 16, and of 13 to 28."""
    faults = [
        {"id": "one", "kind": kind, "at": {"step": 9}, "duration": {"steps": 8}, **more},
        {"id": "two", "kind": kind, "at": {"step": 13}, "duration": {"steps": 16}, **more},
    ]
    return play(
        cell_of("drop-replica", faults, every=2, steps=50, launcher={"kind": "sim"}), folder, seed=3
    )


def seconds(played: Played, steps: range) -> float:
    """Of the slowest rank in such steps, as a rule."""
    commits = [e for e in played.log.of(Kind.STEP_COMMITTED) if e.step in steps]
    return median(
        max(sum(e.data["seconds"].values()) for e in commits if e.step == step) for step in steps
    )


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", SLOW)
def test_who_is_slowed_twice_is_slow_until_both_are_over(tmp_path: Path, kind: str) -> None:
    played = twice(tmp_path, kind, **SLOW[kind])
    usual = seconds(played, range(2, 8))
    assert seconds(played, range(FIRST, LAST + 1)) > 1.3 * usual
    assert seconds(played, range(30, 50)) < 1.3 * usual


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["read-only", "disk-full", "io-error"])
def test_a_disk_that_two_faults_have_takes_nothing_until_both_are_over(
    tmp_path: Path, kind: str
) -> None:
    target = {"target": {"rank": 0}} if kind == "io-error" else {}
    played = twice(tmp_path, kind, **target)
    saved = {e.step for e in played.log.of(Kind.CHECKPOINT_COMMITTED)}
    assert {6, 8, 32} <= saved and saved.isdisjoint(range(10, 28))


def test_what_is_wanted_of_one_thing_by_several() -> None:
    of = ActiveEffects()
    assert of.begin("slow", "w1", "a", 2) == [2]
    assert of.begin("slow", "w1", "b", 3) == [2, 3]
    assert of.begin("slow", "w1", "a", 4) == [3, 4], "the newest is last, and nobody is in it twice"
    assert of.end("slow", "w2", "a") == [] == of.end("fast", "w1", "a")
    assert of.end("slow", "w1", "a") == [3] == of.end("slow", "w1", "a") == of.now("slow", "w1")
    assert of.end("slow", "w1", "b") == []


def test_links_between_nodes_do_what_all_faults_want_of_them() -> None:
    scene: Any = FakeScene()
    # ranks 0 and 1 are on one node, 2 and 3 on the other: both links are one
    one, two = (link_aim(scene, scene.links, [link]) for link in ((0, 2), (1, 3)))
    slow, late = LinkShape(bytes_per_s=1000.0, loss=0.5), LinkShape(delay_s=0.5, loss=0.5)
    one.target.shape(slow)
    two.target.shape(late)
    assert scene.nodes.shapes["0", "1"] == LinkShape(bytes_per_s=1000.0, delay_s=0.5, loss=0.75)
    one.target.shape(LinkShape())
    assert scene.nodes.shapes["0", "1"] == late
    one.target.shape(LinkShape())
    assert scene.nodes.shapes["0", "1"] == late, "a second heal takes nothing from another"
    two.target.shape(LinkShape())
    assert scene.nodes.shapes["0", "1"] == LinkShape()


@pytest.mark.slow
def test_what_a_process_writes_is_looked_for_once_however_many_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[EventLogTail] = []
    read = EventLogTail.read
    monkeypatch.setattr(EventLogTail, "read", lambda tail: looks.append(tail) or read(tail))  # type: ignore[func-returns-value]

    def looked(name: str, count: int) -> int:
        """Nobody sees an effect of a slow disk where nothing is saved."""
        slight = {"kind": "io-slow", "params": {"delay_s": 1}, "target": {"rank": 0}}
        faults = [{"id": f"f{n}", "at": {"step": 5}, **slight} for n in range(count)]
        looks.clear()
        played = play(
            cell_of("drop-replica", faults, every=100, launcher={"kind": "sim"}),
            tmp_path / name,
            seed=3,
        )
        assert len(list(played.log.of(Kind.FAULT_INJECTED))) == count
        return len(looks)

    assert looked("many", 20) < 2 * looked("one", 1)
