"""Judging looks at each event a number of times that grows neither with the length of a log, nor
with the ranks or failures in it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.search.simulate import Played, cell_of, evidence, play
from trainchaos.chaos.events.log import Event, read_log
from trainchaos.harness.judge.checkers import check_all
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.verdict.arms import absurdity

LEAST = 300
WATCHED = ("/harness/judge/", "/chaos/events/", "/chaos/fault/")


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


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["hot-spare", "checkpoint-restart"])
@pytest.mark.sample(1)
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


# ---- visits: lines of code that are executed, of which a loop executes some for each event

Visits = Counter[str]
"""Function -> lines of it that were executed, each turn of a comprehension included."""


def visits(act: Callable[[], object]) -> Visits:
    """Of the judge, and of what it uses."""
    found: Visits = Counter()

    def inside(frame: FrameType, what: str, given: Any) -> Any:
        found[f"{frame.f_code.co_filename}: {frame.f_code.co_qualname}"] += what == "line"
        return inside

    def entered(frame: FrameType, what: str, given: Any) -> Any:
        watched = any(part in frame.f_code.co_filename for part in WATCHED)
        return inside if watched else None

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        act()
    finally:
        sys.settrace(before)
    return found


def judged(root: Path, strategy: str, steps: int = 60, ranks: int = 4, failures: int = 1) -> Visits:
    """Visits to read and judge the log of a job, with itself as its control."""
    cell = cell_of(strategy, kills(failures), steps=steps, ranks=ranks, global_batch=48)
    played = play(cell, root, seed=3)
    assert played.outcome == "completed"
    (folder,) = {path.parent for path in root.rglob("orchestrator.jsonl")}

    def act() -> None:
        log, control = (replace(played, log=read_log(folder)) for _ in range(2))
        assert not absurdity(log.log, cell.scenario)
        check_all(evidence(log, control))
        measure(control.log, None)

    return visits(act)


def steeper(few: Visits, more: Visits, most: Visits) -> dict[str, tuple[int, int]]:
    """Functions that are visited far more than twice as often for twice as much more."""
    grown = {name: (more[name] - few[name], most[name] - more[name]) for name in most}
    return {name: (a, b) for name, (a, b) in grown.items() if b > max(2.5 * a, LEAST)}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["hot-spare", "drop-replica", "checkpoint-restart"])
@pytest.mark.sample(1)
def test_a_longer_log_is_not_read_and_judged_more_slowly(strategy: str, tmp_path: Path) -> None:
    found = [judged(tmp_path / str(steps), strategy, steps=steps) for steps in (60, 120, 240)]
    assert not steeper(*found)


@pytest.mark.slow
def test_a_log_of_more_ranks_is_not_judged_more_slowly(tmp_path: Path) -> None:
    sizes = (12, 24, 48)  # of few ranks the log has the groups that stand by as well
    found = [judged(tmp_path / str(n), "hot-spare", steps=20, ranks=n) for n in sizes]
    assert not steeper(*found)
