"""Simulated jobs have groups that stand by, as real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.search.simulate import cell_of, play
from trainchaos.chaos.events.log import Event, Kind, Log

KILL = {"id": "kill", "kind": "process-kill", "target": {"rank": 2}}


def formed(log: Log, generation: int) -> list[Event]:
    """By which members the group of a generation was formed."""
    return [e for e in log.of(Kind.GROUP_FORMED) if e.generation == generation]


@pytest.mark.parametrize("strategy", ["hot-spare", "drop-replica"])
def test_a_loss_takes_the_group_that_stands_by(strategy: str, tmp_path: Path) -> None:
    cell = cell_of(strategy, [{**KILL, "at": {"step": 20}}], steps=40)
    log = play(cell, tmp_path, seed=3).log
    standing = {
        e.data["lost"]: e.data["members"] for e in log.of(Kind.STANDBY_FORMED) if e.generation == 1
    }
    (started,) = (e for e in log.of(Kind.GENERATION_STARTED) if e.generation == 2)
    assert started.data["members"] == standing[2]
    taken = formed(log, 2)
    assert len(taken) == len(standing[2])
    assert all(e.data["standby"] is True and e.data["seconds"] < 0.005 for e in taken)
    assert not any(e.data.get("standby") for e in formed(log, 1))


def test_two_losses_at_once_form_a_group_as_ever(tmp_path: Path) -> None:
    both = [
        {**KILL, "id": f"kill{rank}", "target": {"rank": rank}, "at": {"step": 20}}
        for rank in (1, 2)
    ]
    log = play(cell_of("drop-replica", both, steps=40), tmp_path, seed=3).log
    after = next(e for e in log.of(Kind.GENERATION_READY) if len(e.data["members"]) == 2)
    taken = formed(log, after.generation)
    assert len(taken) == 2 and not any(e.data.get("standby") for e in taken)
