"""Which groups stand by: the next one for each loss that a strategy answers without waiting."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.recovery.policy.test_strategies import VARIANTS, name
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategies.none import NoRecovery
from trainchaos.recovery.policy.strategy import (
    Cause,
    ClusterView,
    Decision,
    Failure,
    Form,
    Health,
    ProcessView,
    StateFrom,
    Strategy,
)
from trainchaos.recovery.standby.likely import MOST_RANKS, likely_groups
from trainchaos.recovery.supervise.job_state import JobState


def training(ranks: int, *, spares: int = 0, shards: int = 1) -> ClusterView:
    """A job in the midst of training, its spares ready."""
    members = tuple(f"w{rank}" for rank in range(ranks))
    return ClusterView(
        now_s=10.0,
        generation=1,
        world=ranks,
        spares=spares,
        members=members,
        processes=(
            *(
                ProcessView(
                    name=who,
                    role="worker",
                    health=Health.TRAINING,
                    rank=rank,
                    step=7,
                    valid=True,
                    shard=rank % shards,
                )
                for rank, who in enumerate(members)
            ),
            *(
                ProcessView(name=f"s{number}", role="spare", health=Health.READY)
                for number in range(spares)
            ),
        ),
        failures=(),
        shards=shards,
    )


def test_a_drop_leaves_the_others() -> None:
    assert likely_groups(DropReplica(), training(4)) == {
        0: ("w1", "w2", "w3"),
        1: ("w0", "w2", "w3"),
        2: ("w0", "w1", "w3"),
        3: ("w0", "w1", "w2"),
    }


def test_a_broken_replica_leaves_as_a_whole_and_has_one_group() -> None:
    assert likely_groups(DropReplica(), training(4, shards=2)) == {
        0: ("w2", "w3"),
        2: ("w0", "w1"),
    }


def test_a_spare_takes_the_lost_ranks_place() -> None:
    assert likely_groups(HotSpare(), training(3, spares=1)) == {
        0: ("s0", "w1", "w2"),
        1: ("w0", "s0", "w2"),
        2: ("w0", "w1", "s0"),
    }
    assert likely_groups(HotSpare(), training(3)) == likely_groups(DropReplica(), training(3))
    assert likely_groups(HotSpare(), training(2, spares=1)) == {0: ("s0", "w1"), 1: ("w0", "s0")}


@pytest.mark.parametrize(
    ("strategy", "view"),
    [
        (DropReplica(), training(1)),
        (DropReplica(), training(2)),  # one rank has nobody to connect to
        (DropReplica(), training(MOST_RANKS + 1)),
        (CheckpointRestart(), training(4)),
        (NoRecovery(), training(4)),
    ],
    ids=["alone", "one left", "too many", "all restart", "the job ends"],
)
def test_where_the_next_group_is_not_known_there_is_none(
    strategy: Strategy, view: ClusterView
) -> None:
    assert likely_groups(strategy, view) == {}


@pytest.mark.slow
@given(st.sampled_from(VARIANTS), st.integers(1, MOST_RANKS), st.integers(0, 2))
def test_what_is_predicted_is_what_the_strategy_then_decides(
    strategy: Strategy, ranks: int, spares: int
) -> None:
    view = training(ranks, spares=spares)
    for lost, members in likely_groups(strategy, view).items():
        who = view.members[lost]
        gone = Failure(process=who, rank=lost, cause=Cause.EXIT, step=9, time_s=11.0, generation=1)
        after = replace(
            view,
            now_s=11.5,
            failures=(gone,),
            processes=tuple(
                one
                if one.rank is None
                else one._replace(
                    step=9,
                    valid=one.name != who,
                    health=Health.DEAD if one.name == who else Health.PARKED,
                )
                for one in view.processes
            ),
        )
        decided = strategy.on_failure(after).actions
        (form,) = [action for action in decided if isinstance(action, Form)]
        assert form.members == members and form.state is StateFrom.PEER, name(strategy)


def test_a_large_job_is_not_looked_at() -> None:
    """A view of many thousand ranks takes a while, and nothing would follow from it."""

    def view() -> ClusterView:
        raise AssertionError("made for nothing")

    job: Any = SimpleNamespace(members=tuple(f"w{rank}" for rank in range(MOST_RANKS + 1)))
    JobState.stand_by(job, DropReplica(), view)
    job.members = job.members[:MOST_RANKS]
    with pytest.raises(AssertionError, match="for nothing"):
        JobState.stand_by(job, DropReplica(), view)


def test_a_strategy_that_fails_at_a_loss_that_has_not_happened_ends_nothing() -> None:
    class Odd(DropReplica):
        """A plugin's."""

        def on_failure(self, view: ClusterView) -> Decision:
            """Knows no such view."""
            raise KeyError(view.generation)

    assert likely_groups(Odd(), training(4)) == {}
