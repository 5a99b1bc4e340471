"""The last good checkpoint is never lost: what supervisor and ranks tell each other, and whole jobs
for real.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.recovery.checkpoint.test_checkpointer import ALONE, Rank
from tests.recovery.checkpoint.test_checkpoints import flip
from tests.recovery.supervise.test_controller import FakeHands, Rig
from tests.support.fakes.orders import join
from tests.support.running import Running, scripts
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.checkpointer import NothingToRestore
from trainchaos.recovery.checkpoint.files import checkpoints, retention
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import StateFrom
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.supervise.adoption import JobRecord
from trainchaos.recovery.supervise.controller import Controller
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.wire import (
    Agreed,
    CheckpointNote,
    Digest,
    Join,
    Joined,
    Ready,
    Unrecoverable,
)

# ---- supervisor


def compare(rig: Rig, step: int, *, odd: str = "") -> None:
    """All members send their digests of a step."""
    for name in rig.members:
        digest = "other" if name == odd else "same"
        rig.control.on_message(
            name, Digest(generation=rig.control.generation, step=step, digest=digest)
        )


def save(rig: Rig, step: int) -> None:
    name = checkpoints.name_of(step)
    rig.control.on_message(
        rig.members[0], CheckpointNote(state="committed", checkpoint=name, step=step)
    )


def test_the_rank_that_saves_hears_at_which_step_the_replicas_agreed() -> None:
    rig = Rig(HotSpare())
    rig.train(steps=20)
    save(rig, 10)
    compare(rig, 20)
    assert [(n, m.step) for n, m in rig.hands.sent if isinstance(m, Agreed)] == [("w0", 20)]
    assert rig.events(Kind.REPLICAS_AGREED) == [{"saved": 10}]
    save(rig, 20)
    assert rig.events(Kind.REPLICAS_AGREED)[-1] == {"saved": 20}
    save(rig, 30)
    assert len(rig.events(Kind.REPLICAS_AGREED)) == 2, "nothing new is vouched for"
    rig.die("w0")
    rig.park("w1", "w2", "w3", step=30)
    assert {(j.resume.agreed, j.resume.anew) for j in rig.joins().values()} == {(20, False)}, (
        "and so does who saves next"
    )


def test_before_anything_was_saved_initial_values_will_do() -> None:
    rig = Rig(HotSpare())
    rig.train(steps=20)
    rig.die("w0")
    rig.park("w1", "w2", "w3", step=20)
    assert all(join.resume.anew for join in rig.joins().values())


def test_a_rank_with_nothing_left_to_restore_ends_the_job_at_once() -> None:
    rig = Rig(HotSpare())
    rig.train(steps=20)
    rig.control.on_message("w0", Unrecoverable(error="nothing is left to restore in checkpoints"))
    assert (rig.control.outcome, rig.control.reason) == (
        "gave-up",
        "nothing is left to restore in checkpoints",
    )


def test_a_restart_says_what_it_goes_back_to_only_when_there_is_something() -> None:
    for saves in (False, True):
        rig = Rig(HotSpare(spares=1), world=1)
        rig.train(steps=20)
        if saves:
            save(rig, 10)
        rig.die("w0")
        reason = rig.events(Kind.DECISION)[-1]["reason"]
        assert ("back to the newest good checkpoint" in reason) == saves
        assert ("begun anew" in reason) != saves


@pytest.mark.parametrize("state", [StateFrom.CHECKPOINT, StateFrom.INITIAL])
def test_a_takeover_before_the_first_generation_begins_as_the_job_was_to(state: StateFrom) -> None:
    hands = FakeHands()
    lost = Controller(HotSpare(), hands, world=2, steps=100, store_port=1)
    lost.start(state)
    control = Controller(HotSpare(), hands, world=2, steps=100, store_port=1)
    control.adopt(JobRecord(roles={name: role for name, role, _ in hands.spawned}), state)
    for name, _, _ in hands.spawned:
        control.on_message(name, Ready())
    joins = [message for _, message in hands.sent if isinstance(message, Join)]
    assert len(joins) == 2
    assert {join.state.restore for join in joins} == {state is StateFrom.CHECKPOINT}


def test_a_checkpoint_that_was_restored_counts_as_one_of_the_job() -> None:
    rig = Rig(HotSpare(), world=1)
    rig.ready(*rig.names())
    name = checkpoints.name_of(40)
    rig.control.job.formation.afresh = True
    rig.control.on_message("w0", Joined(generation=1, step=40, checkpoint=name))
    assert rig.control.job.digests.has_checkpoint and not rig.control.job.digests.word.anew


# ---- rank


def test_an_agent_remembers_the_last_agreement(tmp_path: Path) -> None:
    one, other = socket.socketpair()
    agent = RankAgent(Channel(one))
    agent._handle(join(agreed=40))
    agent._handle(Agreed(step=50))
    agent._handle(join(agreed=-1))
    assert agent.heard.agreed == 50, "a supervisor that does not know takes nothing back"
    one.close()
    other.close()


def saver(directory: Path, **config: object) -> Rank:
    return Rank(
        directory, world=2, checkpoint_every=10, checkpoint_keep=3, verify_every=50, **config
    )


def test_a_rank_keeps_what_was_agreed_on_and_sets_aside_what_is_in_doubt(tmp_path: Path) -> None:
    rank = saver(tmp_path)
    rank.agreed = 0
    rank.run(50)
    rank.agreed = 50
    rank.run(40)
    assert [c.step for c in checkpoints.newest_first(tmp_path)] == [90, 80, 70, 50]
    rank.saver.distrust([(2, 50)], deletes=True)
    assert [c.step for c in checkpoints.newest_first(tmp_path)] == [50]
    assert rank.said(Kind.CHECKPOINT_SET_ASIDE) == [70, 80, 90]
    assert rank.saver.restore(None, ALONE) == "step-00000050"  # type: ignore[arg-type]


def test_retention_reads_nothing_that_was_just_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("a checkpoint was read")

    rank = saver(tmp_path)
    rank.agreed = 0
    monkeypatch.setattr("trainchaos.recovery.checkpoint.files.pieces.check", read)
    rank.run(60)
    assert [c.step for c in checkpoints.newest_first(tmp_path)] == [60, 50, 40]


def test_a_slow_disk_shows_progress_while_it_deletes(tmp_path: Path) -> None:
    rank = saver(tmp_path)
    rank.agreed = 0
    rank.run(59)
    before: list[int] = []
    rank.saver.disk = lambda what, path: before.append(rank.touched) if what == "delete" else None
    rank.run(1)
    assert before and before[0] < rank.touched + 1 and before == sorted(set(before)), (
        "each is a sign of life"
    )


def test_nothing_left_to_restore_is_an_error_of_its_own(tmp_path: Path) -> None:
    rank = saver(tmp_path)
    rank.saver.require(anew=True, fresh=True)  # there never was one
    rank.run(10)
    data = next(tmp_path.glob("step-*/rank-0000.bin"))
    flip(data, 100)
    assert rank.saver.restore(None, ALONE) is None  # type: ignore[arg-type]
    for anew in (False, True):
        with pytest.raises(
            NothingToRestore, match=r"nothing is left to restore .*step-00000010 may not be used"
        ):
            rank.saver.require(anew=anew, fresh=True)
    assert isinstance(rank.notes[-1], Unrecoverable)


def test_what_was_set_aside_is_no_reason_to_begin_anew_silently(tmp_path: Path) -> None:
    rank = saver(tmp_path)
    rank.run(10)
    retention.set_aside(tmp_path, lambda _: True)
    again = saver(tmp_path)
    assert again.saver.restore(None, ALONE) is None  # type: ignore[arg-type]
    with pytest.raises(NothingToRestore, match="doubtful-step-00000010"):
        again.saver.require(anew=True, fresh=True)


# ---- for real


CHANGED = """
import sys, torch
from trainchaos import recovery
job = recovery.join(samples=256, steps=120, global_batch=8, checkpoint_dir=sys.argv[1])
torch.manual_seed(job.seed)
model = torch.nn.Linear(4, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
while job.running():
    with job.step() as step:
        inputs = torch.tensor([[i / 256, 1.0, -i / 256, 0.5] for i in step.samples])
        step.backward((model(inputs) ** 2).sum())
        if (job.rank, job.generation, step.number) == (1, 1, int(sys.argv[2])):
            with torch.no_grad():
                model.weight[0, 0] += 1e-3  # one value, as a bit flip would
        step.commit()
"""
EVERY = ("--every", "10", "--keep", "3", "--verify-every", "50")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts jobs of that script; none outlives the test."""
    with scripts(tmp_path, CHANGED) as begin:
        yield lambda *options, changed: begin(options, changed)


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["hot-spare", "drop-replica", "checkpoint-restart"])
def test_a_changed_value_costs_no_more_than_the_steps_since_the_agreement(
    start: Callable[..., Running], tmp_path: Path, strategy: str
) -> None:
    job = start("--strategy", strategy, *EVERY, changed=85)
    assert job.end() == 0, job.said
    _, ready = job.of("orchestrator", Kind.GENERATION_READY)[:2]
    assert (ready.step, ready.data["checkpoint"]) == (50, "step-00000050"), job.said
    assert "restored from step-00000050" in job.said
    assert retention.aside_in(tmp_path / "checkpoints")
    assert job.of("orchestrator", Kind.RUN_FINISHED)[0].data["committed_step"] == 120


@pytest.mark.real
@pytest.mark.long
def test_with_nothing_left_the_job_ends_with_its_own_error_unless_told_to_begin_anew(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    job = start(*EVERY, changed=0)
    assert job.end() == 0, job.said
    for data in (tmp_path / "checkpoints").glob("step-*/rank-0000.bin"):
        flip(data, 20)
    job = start(*EVERY, changed=0)
    assert job.end() == 1
    assert "gave-up: nothing is left to restore in " in job.said and "begun anew" not in job.said
    job = start("--fresh", *EVERY, changed=0)
    assert job.end() == 0, job.said
    (ready,) = job.of("orchestrator", Kind.GENERATION_READY)
    assert (ready.step, ready.data["checkpoint"]) == (0, None)
