"""The order of time limits: each pair in the wrong order is named, with what to change."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.recovery.supervise.test_controller import FakeHands
from trainchaos.chaos.errors import ScenarioError
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.supervise import supervision
from trainchaos.recovery.supervise.controller import Controller
from trainchaos.recovery.supervise.supervision import Timing, clashes

PAIRS = [(short, long) for short, long, _ in supervision._ORDER]


def test_the_defaults_are_in_order() -> None:
    assert list(clashes(Timing())) == []


def value(timing: Timing, name: str) -> float:
    part, _, field = name.rpartition(".")
    found: float = getattr(timing.hang if part else timing, field)
    return found


def changed(timing: Timing, name: str, seconds: float) -> Timing:
    part, _, field = name.rpartition(".")
    if part:
        return dataclasses.replace(
            timing, hang=dataclasses.replace(timing.hang, **{field: seconds})
        )
    values: dict[str, Any] = {field: seconds}
    return dataclasses.replace(timing, **values)


@pytest.mark.parametrize(("short", "long"), PAIRS)
def test_each_pair_in_the_wrong_order_is_named(short: str, long: str) -> None:
    timing = changed(Timing(), "hang.given_s", 30.0) if "given_s" in short + long else Timing()
    if "*" in short:
        wrong = dataclasses.replace(timing, join_timeout_s=9.0)
    else:
        wrong = changed(timing, short, value(timing, long))  # as long is too long
    assert (short, long) in [(clash.short, clash.long) for clash in clashes(wrong)]


def test_a_job_does_not_start_with_limits_that_clash() -> None:
    timing = dataclasses.replace(Timing(), park_timeout_s=400.0)
    with pytest.raises(ScenarioError) as caught:
        Controller(DropReplica(), FakeHands(), world=4, steps=10, store_port=1, timing=timing)
    text = str(caught.value)
    assert "park_timeout_s (400 s) must be less than join_timeout_s (60 s)" in text
    assert "a rank that does not leave would not be found while the next group forms" in text
    assert caught.value.hint == "lower park_timeout_s or raise join_timeout_s"
