"""Whose place is distrusted: processes that a decision replaces for their values, and no others."""

from __future__ import annotations

from trainchaos.recovery.policy.fallback import wrong_values
from trainchaos.recovery.policy.strategy import (
    Cause,
    Decision,
    Failure,
    Form,
    Kill,
    Spawn,
    StateFrom,
)


def failure(process: str | None, cause: Cause) -> Failure:
    return Failure(process=process, rank=1, cause=cause, step=5, time_s=1.0)


def form(*members: str, bench: tuple[str, ...] = ()) -> Form:
    return Form(members=members, state=StateFrom.PEER, bench=bench)


def found(*actions: Kill | Spawn | Form, cause: Cause = Cause.NONFINITE) -> list[str]:
    return wrong_values(Decision(actions=actions, reason=""), [failure("w1", cause)])


def test_who_is_left_out_or_ended_for_its_values_is_named() -> None:
    spawn = Spawn(role="worker")
    assert found(spawn, form("w0", "new-0")) == ["w1"]
    assert found(spawn, form("w0", "new-0"), cause=Cause.DIVERGED) == ["w1"]
    assert found(Kill(process="w1"), spawn) == ["w1"]


def test_who_stays_or_failed_otherwise_is_not() -> None:
    assert found(form("w0", "w1")) == [], "it copies a peer's state"
    assert found(form("w0", bench=("w1",))) == []
    assert found(Spawn(role="worker")) == [], "nothing is decided about it"
    for cause in (Cause.EXIT, Cause.HANG, Cause.ERROR):
        assert found(Kill(process="w1"), form("w0", "new-0"), cause=cause) == []
    nobody = [failure(None, Cause.DIVERGED)]
    assert wrong_values(Decision(actions=(form("w0"),), reason=""), nobody) == []
