"""Excluded samples are sent once, in pieces; the cost of a step does not grow with them."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.recovery.supervise.test_controller import FakeHands, Rig
from tests.recovery.supervise.test_excluded_samples import view
from tests.support.fakes.orders import join
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.data import order
from trainchaos.recovery.data.exclusion_index import ExclusionIndex
from trainchaos.recovery.data.permutation import Permutation
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import MOST_SHOWN, Form, StateFrom, describe
from trainchaos.recovery.rank import examine
from trainchaos.recovery.rank.membership import Membership, SupervisorOrders
from trainchaos.recovery.supervise.adoption import JobRecord
from trainchaos.recovery.supervise.controller import Controller
from trainchaos.recovery.transport.channel import LONGEST
from trainchaos.recovery.transport.stream import packed
from trainchaos.recovery.transport.wire import MOST_BLAMED, MOST_LEFT_OUT, Join, LeaveOut, Parked

# ---- supervisor


def leave_out(rig: Rig, samples: range, *, since: int) -> None:
    form = Form(
        members=rig.members,
        state=StateFrom.PEER,
        cause="skip",
        skip=tuple(samples),
        skip_from=since,
    )
    rig.control.job.excluded.take(form)


def breaks(rig: Rig, step: int) -> None:
    """A member is lost, and a spare takes its place."""
    lost, *others = rig.members
    rig.die(lost)
    rig.park(*others, step=step)
    rig.join(*rig.members, step=step)


def heard(sent: list[tuple[str, Any]], name: str, received: Membership) -> list[Join]:
    """What a process makes of all that is sent to it."""
    joins = []
    for process, message in sent:
        if process == name and isinstance(message, LeaveOut):
            received.note_exclusions(message)
        elif process == name and isinstance(message, Join):
            received.left_out(message)
            joins.append(message)
    return joins


def test_each_process_is_told_once_and_a_join_does_not_grow() -> None:
    rig = Rig(HotSpare(spares=2), world=5)
    rig.train(steps=20)
    before = max(len(packed(m)) for _, m in rig.hands.sent if isinstance(m, Join))
    count = 50_000
    leave_out(rig, range(10**9, 10**9 + count), since=20)
    breaks(rig, 20)
    first = len(rig.hands.sent)
    for name in rig.members:
        received = Membership(SupervisorOrders(), steps=1)
        joins = heard(rig.hands.sent, name, received)
        assert len(received.left_out(joins[-1])) == count
        assert len(packed(joins[-1])) < before + 60, "what a Join says of one process"
    assert all(len(packed(message)) < LONGEST / 8 for _, message in rig.hands.sent)
    leave_out(rig, range(5), since=30)
    breaks(rig, 30)
    later = [(name, m) for name, m in rig.hands.sent[first:] if isinstance(m, LeaveOut)]
    kept = [m for name, m in later if m.after == count]
    assert (
        all(m.samples == [0, 1, 2, 3, 4] and m.since == [30] * 5 for m in kept) and len(kept) >= 4
    )
    survivors = {name for name, _ in later if len([n for n, _ in later if n == name]) == 1}
    assert len(survivors) >= 3, "who knew of the others hears of the new ones alone"


def test_a_new_process_is_told_as_soon_as_it_is_ready() -> None:
    rig = Rig(HotSpare(spares=1))
    rig.train(steps=20)
    leave_out(rig, range(3 * MOST_LEFT_OUT), since=20)
    name = rig.control.job.table.spawn("spare", "warm")
    rig.ready(name)
    pieces = [m for n, m in rig.hands.sent if n == name]
    assert [type(m) for m in pieces] == [LeaveOut] * 3
    assert [m.after for m in pieces if isinstance(m, LeaveOut)] == [
        0,
        MOST_LEFT_OUT,
        2 * MOST_LEFT_OUT,
    ]


def test_who_takes_over_tells_everybody_anew() -> None:
    known = JobRecord(
        roles={"w0": "worker", "w1": "worker"},
        ready={"w0", "w1"},
        members=("w0", "w1"),
        generation=3,
        ready_generation=3,
        skipped={7: 2, 9: 4},
    )
    hands = FakeHands()
    control = Controller(HotSpare(), hands, world=2, steps=100, store_port=1)
    for name in known.roles:
        hands.marks[name] = hands.marks.get(name) or Rig(HotSpare()).hands.marks["w0"]
    control.adopt(known, StateFrom.INITIAL)
    received = Membership(SupervisorOrders(), steps=1)
    received.note_exclusions(LeaveOut(after=0, samples=[7], since=[2]))
    control.job.excluded.send_missing(control.job.table["w0"])
    heard(hands.sent, "w0", received)
    assert dict(received._left_out) == {7: 2, 9: 4}


def test_shares_of_many_ranks_make_no_line_of_any_length_and_no_text() -> None:
    rig = Rig(HotSpare(spares=1))
    rig.train(steps=20)
    count = 2 * MOST_LEFT_OUT + 5
    leave_out(rig, range(count), since=20)
    said = rig.events(Kind.SAMPLES_SKIPPED)
    assert [len(data["samples"]) for data in said] == [MOST_LEFT_OUT, MOST_LEFT_OUT, 5]
    assert [sample for data in said for sample in data["samples"]] == list(range(count))
    assert {data["since"] for data in said} == {20}
    form = Form(
        members=("w0",), state=StateFrom.PEER, cause="skip", skip=tuple(range(count)), skip_from=20
    )
    assert len(describe(form)) < 500 and f"and {count - MOST_SHOWN} more" in describe(form)
    failure = replace(view((1,)).failures[0], samples=tuple(range(count)))
    reason = (
        HotSpare(nonfinite="skip")
        .on_failure(replace(view((1,)), failures=(failure,), history=()))
        .reason
    )
    assert len(reason) < 500 and f"and {count - MOST_SHOWN} more" in reason


def test_a_share_that_no_message_takes_is_not_named() -> None:
    largest = [2**63 - 1 - number for number in range(MOST_BLAMED)]
    message = Parked(
        generation=1, step=6, valid=True, why="nonfinite", samples=largest, error="x" * 1000
    )
    assert len(packed(message)) < LONGEST
    for samples, named in ((largest, largest), ([*largest, 1], [])):
        job: Any = SimpleNamespace(
            config=SimpleNamespace(nonfinite="skip"),
            examine=0,
            rank=1,
            world=2,
            loss_of=None,
            arranged=SimpleNamespace(alike=1),
        )
        step: Any = SimpleNamespace(number=7, samples=samples, count=len(samples))
        assert examine.samples_to_blame(job, step, (1,)) == named


@pytest.mark.parametrize(
    ("blamed", "world", "alike", "named"),
    [
        ((1,), 2, 1, True),
        ((0, 1), 2, 1, False),  # every share
        ((1,), 2, 2, False),  # one replica of two stages: its share is the whole batch
        ((1,), 4, 2, True),
        ((1, 3), 4, 2, False),
        ((0, 1), 4, 2, True),  # both stages of one replica
        ((0,), 2, 1, False),  # another one
    ],
)
def test_a_share_is_left_out_where_another_is_left(
    blamed: tuple[int, ...], world: int, alike: int, named: bool
) -> None:
    found = order.blamed_share([7, 8], rank=1, blamed=blamed, world=world, alike=alike, most=2)
    assert found == ([7, 8] if named else [])


def test_of_single_samples_no_more_are_named_than_a_message_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = list(range(MOST_BLAMED + 1))
    monkeypatch.setattr(examine, "spoilt_samples", lambda *_: samples)
    job: Any = SimpleNamespace(
        config=SimpleNamespace(nonfinite="retry"),
        examine=7,
        rank=1,
        loss_of=lambda ids: None,
        spoil=None,
        layout=SimpleNamespace(shards=1),
        reducer=None,
        due=lambda number: samples,
        state=SimpleNamespace(model=nn.Linear(1, 1)),
    )
    step: Any = SimpleNamespace(number=7, samples=samples, count=len(samples))
    assert examine.samples_to_blame(job, step, (1,)) == samples[:MOST_BLAMED]


# ---- process


def test_a_rank_that_was_not_told_all_does_not_train() -> None:
    received = Membership(SupervisorOrders(), steps=1)
    received.note_exclusions(LeaveOut(after=0, samples=[1, 2], since=[5, 5]))
    assert received.left_out(join(left_out=2)) == {1: 5, 2: 5}
    with pytest.raises(RuntimeError, match="3 samples are left out, and it was told of 2"):
        received.left_out(join(left_out=3))
    with pytest.raises(RuntimeError, match="after 3"):
        received.note_exclusions(LeaveOut(after=3, samples=[4], since=[5]))
    received.note_exclusions(LeaveOut(after=0, samples=[9], since=[1]))
    assert received.left_out(join(left_out=1)) == {9: 1}


@pytest.mark.parametrize("samples", [1, 7, 64, 1000, 4097])
def test_the_inverse_of_many_is_that_of_each(samples: int) -> None:
    places = Permutation(samples, 5, 3)
    rng = random.Random(samples)
    for count in (1, 47, 48, 500):
        values = [rng.randrange(samples) for _ in range(count)]
        assert places.indices_of(values) == [places.index_of(value) for value in values]
        assert [places.at(index) for index in places.indices_of(values)] == values
    for wrong in (-1, samples):
        with pytest.raises(ValueError):
            places.indices_of([wrong] * 60)


@pytest.mark.parametrize("samples, size", [(64, 8), (1000, 64), (30, 64), (5000, 512)])
def test_a_batch_is_what_it_would_be_after_a_look_at_all(samples: int, size: int) -> None:
    """Also where it lies in several epochs, and while more and more is left out, from past and
    future steps.
    """
    rng = random.Random(samples)
    left_out, plain = ExclusionIndex(), dict[int, int]()
    for step in [1, 2, 3, 2, 3, 4, 40, 41, 12, 200]:
        new = {rng.randrange(samples + 3): rng.randrange(1, 50) for _ in range(rng.randrange(12))}
        left_out.add(new)
        plain |= new
        expected = order.without(order.batch(step, size, samples, 5), step, plain)
        assert list(order.Batch(step, size, samples, 5, left_out)) == expected
        assert list(order.Batch(step, size, samples, 5, plain)) == expected
        assert left_out == plain


def work_of(left_out: ExclusionIndex, steps: range) -> int:
    """Lines of Python that it takes to know the batches of these steps."""
    lines = 0

    def count(frame: FrameType, what: str, _: object) -> Any:
        nonlocal lines
        lines += what == "line"
        return count

    sys.settrace(count)
    try:
        for step in steps:
            len(order.Batch(step, 64, 1_000_000, 5, left_out))
    finally:
        sys.settrace(None)
    return lines


def test_a_step_costs_the_same_however_many_are_left_out() -> None:
    rng = random.Random(1)
    work = []
    for count in (10, 20_000):
        left_out = ExclusionIndex({rng.randrange(1_000_000): 1 for _ in range(count)})
        len(order.Batch(1, 64, 1_000_000, 5, left_out))  # looked up once an epoch
        work.append(work_of(left_out, range(2, 52)))
    assert work[1] < 1.5 * work[0] + 50 * 20
