"""Stop conditions and steady state: what is read, and when it holds."""

from __future__ import annotations

from typing import Any

import pytest

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.sla import ClauseError, parse_stop
from trainchaos.chaos.scenario.steady import parse_steady
from trainchaos.chaos.schedule.stops import FailureTally, JobSnapshot, to_stop


def stop(*rules: str, **seen: Any) -> str | None:
    facts: dict[str, Any] = {
        "idle_s": 1.0,
        "wall_s": 1.0,
        "healthy": 4,
        "failures": 0,
        "nonfinite": False,
    }
    return to_stop([parse_stop(rule) for rule in rules], JobSnapshot(**{**facts, **seen}))


def test_each_condition_holds_only_beyond_its_limit() -> None:
    assert stop("no_committed_step_for > 60s", idle_s=60) is None
    assert stop("no_committed_step_for > 60s", idle_s=61) == "no_committed_step_for > 60s"
    assert stop("wall_time > 5m", wall_s=301) == "wall_time > 5m"
    assert stop("healthy_replicas < 3", healthy=3) is None
    assert stop("healthy_replicas < 3", healthy=2) == "healthy_replicas < 3: healthy_replicas is 2"
    assert stop("healthy_replicas < 3", healthy=None) is None  # training has not begun
    assert stop("failures > 0") is None
    assert stop("failures > 2", failures=3) == "failures > 2: failures is 3"
    assert stop("loss_nonfinite") is None
    assert str(stop("loss_nonfinite", nonfinite=True)).startswith("loss_nonfinite: ")
    assert stop("wall_time > 9s", "failures > 2", failures=3) == "failures > 2: failures is 3"


def failure(cause: str) -> Event:
    data = {"failure": 0, "cause": cause, "process": "w0", "rank": 0, "detail": ""}
    return Event(
        kind=Kind.FAILURE_DETECTED,
        actor="orchestrator",
        seq=0,
        time_ns=0,
        generation=1,
        step=None,
        data=data,
    )


def test_failures_are_counted() -> None:
    tally = FailureTally()
    tally.observe(failure("exit"))
    assert (tally.failures, tally.nonfinite) == (1, False)
    tally.observe(failure("nonfinite"))
    assert (tally.failures, tally.nonfinite) == (2, True)


def test_steady_checks() -> None:
    rule = parse_steady("committed_steps >= 5 within 60s")
    assert (rule.name, rule.limit, rule.within_s, rule.over) == ("committed_steps", 5, 60, None)
    assert rule.holds(5) and not rule.holds(4)
    spread = parse_steady("step_time_cv < .5 over 10 steps")
    assert (spread.limit, spread.over) == (0.5, 10)
    assert parse_steady("healthy_replicas==4").holds(4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("goodput > 1", "unknown measure 'goodput'"),
        ("commited_steps > 1", "did you mean 'committed_steps'?"),
        (
            "committed_steps",
            "cannot read 'committed_steps': write 'committed_steps >= 5 within 60s'",
        ),
        ("committed_steps <> 5", "unknown comparison '<>'"),
        ("committed_steps > 5 over 3 steps", "committed_steps takes no 'over n steps'"),
        ("step_time_cv < 1", "step_time_cv needs 'over n steps'"),
        ("step_time_cv < 1 over 1 steps", "over takes 2 to 10000 steps"),
        ("step_time_cv < 1 over 5 steps within 3s", "takes no 'within'"),
        ("committed_steps > 5 within soon", "'soon' is not a duration"),
    ],
)
def test_steady_checks_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ClauseError) as raised:
        parse_steady(text)
    assert message in str(raised.value)
