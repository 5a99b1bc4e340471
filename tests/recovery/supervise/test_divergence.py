"""Digests of replicas: who differs is named, nobody is named without a majority, and nothing piles
up.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from tests.support.search.simulate import cell_of, play
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.rank.generation import starting_digest
from trainchaos.recovery.state.fingerprint import fingerprint
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.supervise.divergence import (
    MAX_OPEN_STEPS,
    MAX_SAVED_STEPS,
    DigestBook,
    Disagreement,
)

FOUR = ("w0", "w1", "w2", "w3")


def book(members: tuple[str, ...] = FOUR, *, shards: int = 1) -> DigestBook:
    made = DigestBook()
    made.began(1, members, shards=shards)
    made.formed(restored=0)
    return made


def tell(made: DigestBook, step: int, **digests: str) -> list[Disagreement]:
    found = [made.note(name, 1, step, digest) for name, digest in digests.items()]
    return [one for one in found if one is not None]


def test_equal_digests_are_an_agreement() -> None:
    made = book()
    assert tell(made, 10, w0="a", w1="a", w2="a", w3="a") == []
    assert (made.agreed, made.trust) == (10, -1)


def test_nothing_is_said_before_all_have_come() -> None:
    made = book()
    assert tell(made, 10, w0="a", w1="b", w2="c") == []
    assert (made.agreed, made.trust) == (0, -1)


@pytest.mark.parametrize("odd", FOUR)
def test_who_differs_from_most_is_named_whoever_comes_last(odd: str) -> None:
    for order in (FOUR, FOUR[::-1]):
        made = book()
        (found,) = tell(made, 10, **{name: "x" if name == odd else "a" for name in order})
        assert (found.step, found.odd) == (10, (odd,))
        assert made.trust == 0


@pytest.mark.parametrize("digests", ["aabb", "abcd", "aabc"])
def test_without_a_majority_nobody_is_named(digests: str) -> None:
    (found,) = tell(book(), 10, **dict(zip(FOUR, digests, strict=True)))
    assert found.odd == ()
    assert "no majority" in found.detail


def test_only_holders_of_one_shard_are_compared() -> None:
    members = ("w0", "w1", "w2", "w3", "w4", "w5")
    made = book(members, shards=2)
    assert tell(made, 10, **dict(zip(members, "ababab", strict=True))) == []
    (found,) = tell(made, 20, **dict(zip(members, "abacab", strict=True)))
    assert found.odd == ("w3",)
    fully = book(FOUR, shards=4)
    assert tell(fully, 10, **dict(zip(FOUR, "abcd", strict=True))) == []


def test_others_generations_and_strangers_do_not_count() -> None:
    made = book()
    assert made.note("w9", 1, 10, "x") is None
    assert made.note("w0", 2, 10, "x") is None
    assert tell(made, 10, w0="a", w1="a", w2="a", w3="a") == []


def test_steps_that_never_complete_do_not_pile_up() -> None:
    made = book()
    for step in range(1000):
        made.note("w0", 1, step, "a")
    assert len(made._open) <= MAX_OPEN_STEPS + 1
    made.note("w0", 1, 2000, "a")
    assert tell(made, 2000, w1="a", w2="a", w3="a") == []
    assert made._open == {}


def test_checkpoints_of_before_the_last_agreement_can_be_trusted() -> None:
    made = book(FOUR[:2])
    assert not made.has_checkpoint
    for step in (10, 20):
        tell(made, step, w0="a", w1="a" if step == 10 else "b")
        made.saved(step)
    assert (made.trust, made.has_checkpoint) == (10, True)
    made.began(2, FOUR[:2], shards=1)
    assert made.trust == 10  # another failure before it trains: still not to be trusted
    made.formed(restored=10)
    assert (made.trust, made.agreed, made.has_checkpoint) == (-1, 10, True)


def test_a_checkpoint_that_nobody_has_compared_is_none() -> None:
    made = book(FOUR[:2])
    made.saved(10)
    tell(made, 20, w0="a", w1="b")
    assert (made.trust, made.has_checkpoint) == (0, False)


def test_what_was_saved_on_a_course_that_the_job_has_left_is_no_checkpoint_of_it() -> None:
    """The last of a shard that was noticed would go back to it instead of saving what it holds."""
    made = book(FOUR[:2])
    for step in (10, 20):
        made.saved(step)
    made.began(2, FOUR[:2], shards=1)
    assert made.newest == 20
    made.formed(restored=10, checkpoint=True)
    assert (made.newest, made.agreed_checkpoint) == (10, 10)
    made.formed(restored=None)
    made.saved(20)
    assert made.newest == 20, "saved again"
    made.formed(restored=0)
    assert not made.has_checkpoint and not made.word.anew, "it began anew, and does that once"


def test_who_takes_over_deletes_nothing_for_lack_of_knowledge() -> None:
    made = DigestBook()
    made.adopted(1, FOUR, shards=1)
    made.saved(10)
    assert len(tell(made, 20, w0="a", w1="b", w2="a", w3="a")) == 1
    assert (made.trust, made.has_checkpoint) == (-1, False)
    assert tell(made, 30, w0="a", w1="a", w2="a", w3="a") == []
    assert made.agreed == 30


def test_who_takes_over_goes_back_to_what_the_log_says_was_agreed_on() -> None:
    made = DigestBook()
    made.adopted(1, FOUR[:2], shards=1, agreed=50, saved=40)
    assert (made.word.agreed, made.word.anew, made.trust) == (50, False, -1)
    for step in (60, 70):
        made.saved(step)
    assert len(tell(made, 100, w0="a", w1="b")) == 1
    assert (made.trust, made.has_checkpoint, made.agreed_checkpoint) == (50, True, 40)
    again = DigestBook()
    again.adopted(1, FOUR[:2], shards=1, agreed=50, saved=40, doubtful=True)
    assert (again.trust, again.has_checkpoint) == (50, True), (
        "a disagreement that nobody had answered yet"
    )


def test_a_digest_that_is_repeated_to_who_takes_over_is_compared_once() -> None:
    made = DigestBook()
    made.adopted(1, FOUR[:3], shards=1, agreed=10)
    assert tell(made, 20, w1="a", w2="a") == [], "the lost supervisor had read that of w0"
    (found,) = tell(made, 20, w0="b", w1="a", w2="a")
    assert (found.step, found.odd) == (20, ("w0",))
    assert tell(made, 20, w0="b", w1="a", w2="a") == [], "it is known"
    assert tell(made, 10, w0="b", w1="a", w2="a") == [], "the log says that they were the same"
    assert len(tell(made, 30, w0="b", w1="a", w2="a")) == 1


def test_what_was_saved_without_a_supervisor_is_trusted_once_it_is_compared() -> None:
    """A member that is lost before it has repeated its digest leaves nothing to compare with."""

    def taken_over() -> DigestBook:
        made = DigestBook()
        made.adopted(3, FOUR[:2], shards=1, agreed=10, saved=10)
        made.saved(20)
        return made

    lost = taken_over()
    lost.note("w1", 3, 25, "a")
    assert (lost.trust, lost.newest, lost.word.doubts) == (10, 10, ((4, 10),))
    lost.began(4, FOUR[:2], shards=1)
    assert lost.word.doubts == ((5, 10),), "the generation may be broken while it forms"
    lost.formed(restored=10, checkpoint=True)
    assert (lost.trust, lost.newest, lost.doubts) == (-1, 10, ((4, 10),))
    lost.note("w0", 4, 15, "a")
    assert lost.trust == -1, "a comparison under way is no reason for doubt under a supervisor"

    whole = taken_over()
    for name in FOUR[:2]:
        whole.note(name, 3, 25, "a")
    assert (whole.trust, whole.newest, whole.word.doubts) == (-1, 20, ())
    whole.note("w1", 3, 26, "a")
    assert (whole.trust, whole.newest) == (-1, 20)

    silent = taken_over()
    assert (silent.trust, silent.newest) == (-1, 20), "digests may not be asked for"


def test_what_is_remembered_of_checkpoints_does_not_grow() -> None:
    made = book()
    for step in range(10, 100_000, 10):
        made.saved(step)
        if step == 5000:
            tell(made, step, w0="a", w1="a", w2="a", w3="a")
    assert made.agreed_checkpoint == 5000
    assert len(made._saved) <= MAX_SAVED_STEPS + 1


def state() -> TrainState:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).double())
    made = TrainState(model, torch.optim.AdamW(model.parameters()), None, seed=1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.apply(0.0)
    return made


def test_any_bit_of_any_parameter_or_optimizer_state_shows() -> None:
    one, draw = state(), random.Random(3)
    assert fingerprint(one) == fingerprint(state())
    trained = [n for n in one.parts() if "running" not in n and "batches" not in n]
    for name in trained:
        flat = one.parts()[name].view(-1)
        bits = flat.view(torch.int64 if flat.element_size() == 8 else torch.int32)
        before, place = fingerprint(one), draw.randrange(flat.numel())
        kept = int(bits[place])
        bits[place] = kept ^ (1 << draw.randrange(31))
        assert fingerprint(one) != before, name
        bits[place] = kept
        assert fingerprint(one) == before


def test_what_the_next_step_goes_by_shows_too() -> None:
    one = state()
    before = fingerprint(one)
    one.optimizer.param_groups[0]["betas"] = (0.85, 0.999)
    assert fingerprint(one) != before


def test_running_statistics_may_differ() -> None:
    one, other = state(), state()
    other.model[1].running_mean.add_(1)  # type: ignore[index,operator]
    assert fingerprint(one) == fingerprint(other)


def test_where_a_tensor_lies_makes_no_difference() -> None:
    one, other = state(), state()
    weight = other.model[0].weight  # type: ignore[index,union-attr]
    moved = torch.zeros(16)[1:].view(3, 5)
    assert moved.storage_offset() % 2
    weight.data = moved.copy_(weight.data)  # type: ignore[union-attr]
    assert fingerprint(one) == fingerprint(other)


def start(made: DigestBook, **held: tuple[int, str]) -> Disagreement | None:
    return made.joined(held)


def test_members_that_join_with_the_same_may_train() -> None:
    assert start(book(), w0=(5, "a"), w1=(5, "a"), w2=(5, "a"), w3=(5, "a")) is None
    shards = book(FOUR, shards=2)
    assert start(shards, w0=(5, "a"), w1=(5, "b"), w2=(5, "a"), w3=(5, "b")) is None
    assert start(shards, w0=(5, ""), w1=(5, ""), w2=(5, ""), w3=(5, "")) is None
    assert shards.trust == -1


def test_who_joins_with_another_state_or_step_is_named() -> None:
    made = book()
    found = start(made, w0=(5, "a"), w1=(5, "a"), w2=(5, "b"), w3=(5, "a"))
    assert found is not None and (found.step, found.odd) == (5, ("w2",))
    assert "joined with another state than most others (w2 step 5)" in found.detail
    assert made.trust == 0
    found = start(book(FOUR, shards=4), w0=(5, ""), w1=(6, ""), w2=(5, ""), w3=(5, ""))
    assert found is not None and found.odd == ("w1",)


def test_without_a_majority_at_the_start_nobody_is_named() -> None:
    found = start(book(FOUR[:2]), w0=(0, "a"), w1=(0, "b"))
    assert found is not None and found.odd == ()
    assert (
        found.detail
        == "at the start of a generation, 2 different states in 2 replicas, no majority"
    )


class Alike:
    """As much of a job as its digest at the start of a generation needs."""

    layout = Layout(world=2, shards=1)

    def __init__(self) -> None:
        self.state: Any = state()


def test_the_digest_at_the_start_sees_another_state_and_costs_little() -> None:
    one, other = Alike(), Alike()
    assert starting_digest(cast(Any, one)) == starting_digest(cast(Any, other)) != ""
    other.state.optimizer.param_groups[0]["lr"] = 0.5
    assert starting_digest(cast(Any, one)) != starting_digest(cast(Any, other))
    other = Alike()
    for parameter in other.state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    other.state.apply(0.0)  # a step further
    assert starting_digest(cast(Any, one)) != starting_digest(cast(Any, other))
    one.layout = Layout(world=2, shards=2)
    assert starting_digest(cast(Any, one)) == ""


def test_the_part_that_differs_is_named() -> None:
    """Parameters, optimizer and scheduler each have a digest of their own."""
    same, other = "parameters:1 optimizer:2 scheduler:3", "parameters:1 optimizer:9 scheduler:8"
    (found,) = tell(book(), 10, w0=same, w1=other, w2=same, w3=same)
    assert (found.odd, found.detail) == (
        ("w1",),
        "optimizer and scheduler of step 10 differ from those of most other replicas",
    )
    (found,) = tell(book(FOUR[:2]), 10, w0=same, w1=other)
    assert found.detail == (
        "2 different states in 2 replicas at step 10 (in optimizer and scheduler), no majority"
    )
    joined = book().joined({name: (5, other if name == "w2" else same) for name in FOUR})
    assert joined is not None
    assert (
        joined.detail == "joined with another optimizer and scheduler than most others (w2 step 5)"
    )


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_a_difference_before_the_first_agreed_checkpoint_ends_a_restart_alike(
    late: int, memory: Path
) -> None:
    """Whoever is quicker: the save of that step, or the comparison."""
    desync = {
        "id": "desync",
        "kind": "replica-desync",
        "target": {"rank": 1},
        "at": {"step": 5},
    }
    played = play(cell_of("checkpoint-restart", [desync]), memory, seed=late)
    assert played.outcome == "gave-up"
    (end,) = played.log.of(Kind.RUN_FINISHED)
    assert "no checkpoint from before they last agreed" in end.data["reason"]
