"""What a failure costs the supervisor of a large job: it grows with the ranks, not with their
square.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.control_plane.__main__ import ControlledJob, Cost, NoJob, cost_of
from tests.recovery.supervise.test_controller import Rig
from trainchaos.recovery.policy.strategies.checkpoint_restart import CheckpointRestart
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import Cause, Health, Strategy
from trainchaos.recovery.transport.progress_counters import Mark

MANY, LIMIT_MB = 16_384, 32.0
KINDS = pytest.mark.parametrize(
    ("strategy", "shards"),
    [
        pytest.param(HotSpare(), 1, id="hot-spare"),
        pytest.param(HotSpare(), 64, id="hsdp", marks=pytest.mark.long),
        pytest.param(HotSpare(), 2048, id="fsdp", marks=pytest.mark.long),
        pytest.param(DropReplica(), 1, id="drop-replica", marks=pytest.mark.long),
        pytest.param(CheckpointRestart(), 1, id="checkpoint-restart", marks=pytest.mark.long),
    ],
)


def least(strategy: Strategy, worlds: tuple[int, int], shards: int, tries: int = 3) -> list[Cost]:
    """The best of several of each, in turn, since others use the machine as well."""
    costs = [
        [cost_of(strategy, world, shards=min(shards, world)) for world in worlds]
        for _ in range(tries)
    ]
    return [
        replace(
            of_one[0],
            decide_s=min(cost.decide_s for cost in of_one),
            whole_s=min(cost.whole_s for cost in of_one),
        )
        for of_one in zip(*costs, strict=True)
    ]


@pytest.mark.long
@KINDS
def test_four_times_the_ranks_cost_about_four_times_as_much(
    strategy: Strategy, shards: int
) -> None:
    few, many = least(strategy, (256, 1024), shards)
    assert many.decide_s < 7 * few.decide_s, "16 times would be quadratic"
    assert many.whole_s < 7 * few.whole_s


@pytest.mark.long
@pytest.mark.slow
def test_sixteen_thousand_ranks_cost_about_four_times_as_much_as_four_thousand() -> None:
    few, many = least(HotSpare(), (MANY // 4, MANY), 8, tries=2)
    assert many.decide_s < 7 * few.decide_s and many.wire_mb < LIMIT_MB
    assert many.sent == {"Abort": MANY - 1, "Join": MANY}, "one abort a survivor, one join a member"


@pytest.mark.long
@KINDS
def test_sixteen_thousand_ranks_and_their_memory(strategy: Strategy, shards: int) -> None:
    cost = cost_of(strategy, MANY, shards=shards, memory=True)
    assert cost.extra_mb < LIMIT_MB and cost.wire_mb < LIMIT_MB
    few, many = least(strategy, (MANY // 4, MANY), shards, tries=2)
    assert many.decide_s < 7 * few.decide_s


def test_a_message_asks_for_no_mark_and_a_look_for_two_of_each_member(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What each message asked of all members would grow with the square of their number."""
    world = 64
    job, asked = ControlledJob(DropReplica(), world), Counter[str]()
    mark = NoJob.mark

    def counted(self: NoJob, process: str) -> Mark:
        asked[process] += 1
        return mark(self, process)

    monkeypatch.setattr(NoJob, "mark", counted)
    job.go_on()
    job.control.tick()  # the first step of a generation, after which replacements are thought of
    asked.clear()
    job.control.tick()
    assert asked.total() <= 2 * world
    first, *others, last = job.control.members
    job.control.on_exit(first, "signal 9")
    asked.clear()
    for name in others:
        job.park(name)
    assert not asked, "a rank that parks is no reason to look at the others"
    job.park(last)
    assert asked.total() <= 6 * world, "the decision, once"
    asked.clear()
    job.all_join(job.step)
    assert not asked


def test_replacements_are_asked_for_together() -> None:
    rig = Rig(CheckpointRestart())
    rig.train(steps=10)
    rig.die("w2")
    assert rig.hands.expected == ("worker", "warm", 4)


def test_who_trains_is_found_without_the_ranks_that_parked() -> None:
    """A dict keeps the place of what was taken from its front: to find the first entry of one that
    held 16,384 took as long as 16,384 entries, for each rank that parked.
    """
    job = ControlledJob(DropReplica(), 64)
    table = job.control.job.table
    first, *others = job.control.members
    job.control.on_exit(first, "signal 9")
    looked: list[int] = []
    for name in others[:-1]:
        job.park(name)
        looked.append(table._unparked)
        assert table.some_train
    assert looked == sorted(looked) and looked[-1] >= 62, "each look begins where the last ended"
    assert not table._lists[Health.READY] and not table._lists[Health.READY].__sizeof__() > 64


def test_the_dead_are_forgotten_once_they_are_gone_and_no_members() -> None:
    job = ControlledJob(HotSpare(), 4)
    control = job.control
    for _ in range(100):
        victim, *others = control.members
        control.on_exit(victim, "signal 9")
        for name in others:
            job.park(name)
        job.all_join(job.step)
        job.go_on()
        control.tick()
        job.all_ready()
    assert len(list(control.job.table)) <= 6
    assert len(control.job.table.views()) <= 6


def test_who_was_killed_is_remembered_until_it_is_gone() -> None:
    rig = Rig(DropReplica())
    rig.train(steps=10)
    rig.wait(0.1)
    rig.control._fail(rig.control.job.table["w2"], Cause.HANG, "it hangs")
    rig.park("w0", "w1", "w3", step=10)
    rig.join(*rig.members, step=10)
    assert rig.control.job.table["w2"].health is Health.DEAD and rig.control.job.exit_was_expected(
        "w2"
    )
    rig.die("w2")
    assert "w2" not in rig.control.job.table
    rig.die("w2")
    rig.park("w2", step=10)
    assert rig.causes() == [("w2", "hang")]
