"""Judging looks through a whole log a number of times that does not grow with the failures
in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.search.simulate import Played, cell_of, evidence, play
from trainchaos.chaos.events.log import Event
from trainchaos.harness.judge.checkers import check_all


class Counted(tuple[Event, ...]):
    """Counts how often somebody goes through it."""

    rounds = 0

    def __iter__(self) -> Iterator[Event]:
        Counted.rounds += 1
        return super().__iter__()


def kills(count: int) -> list[dict[str, Any]]:
    return [
        {
            "id": f"kill{n}",
            "kind": "process-kill",
            "target": {"rank": n % 4},
            "at": {"step": 10 + 8 * n},
        }
        for n in range(count)
    ]


@pytest.mark.parametrize("strategy", ["hot-spare", "checkpoint-restart"])
def test_many_failures_are_not_many_rounds(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rounds(count: int) -> int:
        cell = cell_of(strategy, kills(count), steps=100)
        played = play(cell, tmp_path / str(count), seed=3)
        assert played.outcome == "completed"
        log = replace(played.log, events=Counted(played.log.events))
        seen = evidence(
            Played(outcome=played.outcome, cell=cell, log=log, directory=played.directory), None
        )
        monkeypatch.setattr(Counted, "rounds", 0)
        findings = check_all(seen)
        assert findings["landing"].verdict == "pass"
        return Counted.rounds

    few, many = rounds(2), rounds(10)
    assert 0 < many <= few + 3
