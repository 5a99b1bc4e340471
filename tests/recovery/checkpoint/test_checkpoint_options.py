"""How checkpoints are asked for: in a scenario and in recovery.join, with errors that say what
would work.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from trainchaos.chaos.scenario.workload import CheckpointSpec
from trainchaos.recovery.policy.jobconfig import JobConfig, Saves
from trainchaos.recovery.rank.joining import JoinError, ScriptSettings, SupervisorSettings, settle


@pytest.mark.parametrize(
    ("every", "steps"), [(25, 25), ("30s", None), ("500ms", None), ("auto", None)]
)
def test_an_interval_is_steps_or_time_or_auto(every: int | str, steps: int | None) -> None:
    assert CheckpointSpec(every=every).steps == steps


BAD: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, "use 1 or more, or a time such as 30s, or auto"),
    ({"every": "soon"}, "write a number and a unit"),
    ({"every": "0s"}, "use 30s, 5m, a number of steps, or auto"),
    ({"delta": 1}, "greater than or equal to 2"),
    ({"mtbf": "1h"}, "use every: auto with it"),
    ({"mode": "later"}, "'sync' or 'async'"),
]


@pytest.mark.parametrize(("values", "words"), BAD, ids=str)
def test_what_cannot_be_is_refused_with_what_would(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CheckpointSpec(**values)


def joined(seat: dict[str, Any], **said: Any) -> JobConfig:
    facts = ScriptSettings(samples=64, steps=10, global_batch=4)
    rest = {"checkpoint_dir": "here", "checkpoint_every": None, "checkpoint_keep": None} | said
    return settle(SupervisorSettings(supervisor="s", process="w0", world=1, **seat), facts, **rest)


def test_a_script_says_how_and_its_supervisor_has_the_last_word() -> None:
    config = joined(
        {}, checkpoint_every="auto", checkpoint={"mode": "async", "delta": 4, "mtbf_s": 60}
    )
    assert (config.checkpoint_every, config.saves) == (
        "auto",
        Saves(mode="async", delta=4, mtbf_s=60),
    )
    config = joined(
        {"checkpoint_every": 5, "saves": Saves(sharded=True)}, checkpoint={"mode": "async"}
    )
    assert (config.checkpoint_every, config.saves) == (5, Saves(sharded=True))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"checkpoint_every": "often"}, "checkpoint_every is often"),
        ({"checkpoint": {"modus": "async"}}, "modus: Extra inputs"),
        ({"checkpoint": {"delta": 0}}, "delta: Input should be greater"),
    ],
)
def test_a_script_that_asks_for_what_there_is_not_is_told(said: dict[str, Any], words: str) -> None:
    with pytest.raises(JoinError, match=words):
        joined({}, **said)
