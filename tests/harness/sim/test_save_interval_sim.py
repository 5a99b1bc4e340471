"""How far apart adaptive has checkpoints of ``every: auto``: only failures that needed one bring
them closer together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.commands.unreported import no_reports
from trainchaos.chaos import cli
from trainchaos.chaos.events.log import Event, Kind, Log, read_log
from trainchaos.harness.host.rundir import open_run
from trainchaos.harness.judge.verdict.judge import judge
from trainchaos.recovery.checkpoint.memory.header import is_memory

__all__ = ["no_reports"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_reports")]

SCENARIO = """\
version: 1
name: spaced
seed: 5
workload:
  {kind: mlp, ranks: 3, steps: 60, global_batch: 12, checkpoint: CHECKPOINT}
recovery: STRATEGY
launcher: sim
baseline: none
faults:
  - {id: one, kind: process-kill, target: {rank: 1}, at: {step: 15}}
  - {id: all, kind: process-kill, target: {role: worker, select: all}, at: {step: 30}}
  - {id: late, kind: process-kill, target: {rank: 0}, at: {step: 45}}
"""


DISK = "{every: auto, keep: 3}"
BOTH = "{every: auto, memory: {every: auto}}"


def events_of(place: Path, strategy: str, checkpoint: str = DISK) -> list[Event]:
    return list(log_of(place, strategy, checkpoint).of(Kind.GENERATION_STARTED))


def log_of(place: Path, strategy: str, checkpoint: str = DISK) -> Log:
    text = SCENARIO.replace("STRATEGY", strategy).replace("CHECKPOINT", checkpoint)
    (place / "spaced.yaml").write_text(text)
    cli.invoke(["run", str(place / "spaced.yaml"), "--runs", str(place / "runs"), "--quiet"])
    run = open_run(place / "runs" / "spaced" / "latest")
    (arm,) = judge(run).arms
    return read_log(run.events(arm.id))


def spacing(events: list[Event]) -> list[dict[str, Any] | None]:
    """Of each generation that trained."""
    return [event.data.get("rewinds") for event in events]


def test_adaptive_spaces_saves_by_the_failures_that_needed_one(tmp_path: Path) -> None:
    told = [one for one in spacing(events_of(tmp_path, "adaptive")) if one is not None]
    assert (told[0]["count"], told[0]["failures"]) == (0, 0)
    after_one = next(one for one in told if one["failures"] == 1)
    assert after_one["count"] == 0, "its peers kept the state"
    last = told[-1]
    assert last["failures"] >= 3 and last["count"] == 1, "all were lost once"
    assert last["every_s"] < after_one["every_s"]


def test_a_fixed_strategy_leaves_it_to_the_ranks(tmp_path: Path) -> None:
    assert set(map(str, spacing(events_of(tmp_path, "drop-replica")))) == {"None"}


def test_adaptive_picks_the_kind_of_each_checkpoint(tmp_path: Path) -> None:
    """The first step shows what the disk costs, the second what memory does. All are lost at step
    30, and memory answers: the disk is needed no more often than before.
    """
    log = log_of(tmp_path, "adaptive", BOTH)
    saves = [(e.step, is_memory(e.data["checkpoint"])) for e in log.of(Kind.CHECKPOINT_SAVING)]
    assert saves[:2] == [(1, False), (2, True)]
    assert len({step for step, _ in saves}) == len(saves), "one kind a step"
    last = spacing(list(log.of(Kind.GENERATION_STARTED)))[-1]
    assert last is not None and (last["count"], last["recalled"]) == (0, 1)
