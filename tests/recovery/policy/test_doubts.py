"""A checkpoint in doubt is not restored, whatever fails on the way; a fresh start is made once,
full disk or not.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.checkpoint.test_checkpoint_safety import compare, save, saver
from tests.recovery.checkpoint.test_checkpointer import ALONE, Rank
from tests.recovery.checkpoint.test_checkpoints import flip
from tests.recovery.checkpoint.test_fence import member
from tests.recovery.supervise.test_controller import FakeHands, Rig
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.checkpoint.checkpointer import NothingToRestore
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint
from trainchaos.recovery.checkpoint.files.fence import CheckpointFence
from trainchaos.recovery.policy import doubts
from trainchaos.recovery.policy.doubts import Doubt
from trainchaos.recovery.policy.interval import Wanted
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import StateFrom
from trainchaos.recovery.supervise.adoption import past
from trainchaos.recovery.supervise.controller import Controller
from trainchaos.recovery.supervise.divergence import DigestBook
from trainchaos.recovery.transport.wire import Inquiry, Join, SetAside, Status


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def restored(rank: Rank) -> str | None:
    return rank.saver.restore(None, ALONE)  # type: ignore[arg-type]


# ---- a fresh start


def test_a_fresh_job_goes_back_to_what_it_saved_although_the_disk_is_full_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member(tmp_path, 1, job_id="before").run(50)
    member(tmp_path, 1, job_id="mine", fresh=True).run(5)
    monkeypatch.setattr(CheckpointFence, "_write", full)
    again = member(tmp_path, 2, job_id="mine", fresh=True)
    assert restored(again) == "step-00000005", "progress counts, and what was there before does not"
    (tmp_path / "fence.json").unlink()
    assert restored(member(tmp_path, 3, job_id="mine", fresh=True)) == "step-00000005"


def test_what_was_there_before_a_fresh_job_never_counts_whatever_the_disk_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member(tmp_path, 1, job_id="before").run(50)
    (old,) = checkpoints.newest_first(tmp_path)[:1]
    monkeypatch.setattr(CheckpointFence, "_write", full)
    rank = member(tmp_path, 1, job_id="mine", fresh=True)
    assert restored(rank) is None
    rank.saver.require(anew=True, fresh=True)
    (old.path / "manifest.json").write_text("torn")
    assert restored(rank) is None
    rank.saver.require(anew=True, fresh=True)
    plain = member(tmp_path, 1, job_id="mine")
    assert not plain.saver._custody.choosing.wanted(
        (1, 4), checkpoints.newest_first(tmp_path)[1]
    ), "what this job holds in memory is newer than an earlier job's, whatever its step"


def test_a_fresh_start_is_made_once(tmp_path: Path) -> None:
    rank = saver(tmp_path, fresh=True, job_id="mine")
    rank.saver.require(anew=True, fresh=True)
    rank.saver.joined(0, ALONE, 1)
    rank.run(10)
    flip(next(tmp_path.glob("step-*/rank-0000.bin")), 100)
    assert restored(rank) is None
    for anew in (False, True):
        with pytest.raises(NothingToRestore, match="step-00000010 may not be used"):
            rank.saver.require(anew=anew, fresh=True)
    with pytest.raises(NothingToRestore):
        saver(tmp_path / "gone", fresh=True).saver.require(anew=False, fresh=True)


def test_what_an_earlier_job_had_set_aside_is_no_fresh_jobs_loss(tmp_path: Path) -> None:
    old = member(tmp_path, 1, job_id="before")
    old.run(5)
    old.saver.distrust([(2, 0)], deletes=True)
    new = member(tmp_path, 1, job_id="mine", fresh=True)
    assert restored(new) is None
    new.saver.require(anew=True, fresh=True)
    new.run(5)
    new.saver.distrust([(2, 0)], deletes=True)
    with pytest.raises(NothingToRestore, match="doubtful-step-00000005"):
        new.saver.require(anew=True, fresh=True)


# ---- a rank


class Stubborn:
    """A disk that gives up nothing until it is mended."""

    broken = True

    def __call__(self, what: str, path: Path) -> None:
        if self.broken and what == "delete":
            raise OSError(errno.EIO, "Input/output error")


def confirmed(rank: Rank) -> list[Sequence[Doubt]]:
    return [note.doubts for note in rank.notes if isinstance(note, SetAside)]


def test_a_rank_says_when_what_is_in_doubt_is_out_of_the_way_and_tries_again(
    tmp_path: Path,
) -> None:
    rank = saver(tmp_path, job_id="one")
    rank.saver.joined(0, ALONE, 1)
    rank.agreed = 0
    rank.run(50)
    disk = rank.saver.disk = Stubborn()
    rank.saver.joined(0, ALONE, 2)
    rank.saver.distrust([(2, 30)], deletes=True)
    assert confirmed(rank) == [] and [c.step for c in checkpoints.newest_first(tmp_path)][:2] == [
        50,
        40,
    ]
    assert restored(rank) == "step-00000030", "nor is it restored while it is there"
    rank.state.step = 34
    rank.saver.wants(35)
    for step, expected in ((35, 0), (40, 1)):
        rank.state.step = step
        rank.saver.after_commit(step, rank=0, layout=ALONE, generation=2, asked=Wanted(disk=True))
        assert len(confirmed(rank)) == expected
        disk.broken = False
    assert confirmed(rank) == [[(2, 30)]]
    steps = [c.step for c in checkpoints.newest_first(tmp_path)]
    assert 50 not in steps and {35, 40} <= set(steps), "what was saved since is not in doubt"
    rank.saver.joined(0, ALONE, 3)
    rank.saver.distrust([(2, 30)], deletes=True)
    assert restored(rank) == "step-00000040", "told again, it sets nothing more aside"


def test_who_takes_the_place_of_a_rank_that_died_before_it_set_aside_knows(tmp_path: Path) -> None:
    rank = saver(tmp_path, job_id="one")
    rank.saver.joined(0, ALONE, 1)
    rank.agreed = 0
    rank.run(50)
    other = member(tmp_path, 3, job_id="one", checkpoint_every=10)
    other.saver.distrust([(2, 30)], deletes=False)
    assert restored(other) == "step-00000030"
    assert confirmed(other) == [], "only who put it out of the way says so"


# ---- a supervisor


def diverged(rig: Rig) -> None:
    """The replicas agreed at step 20, and one was another at 40."""
    rig.train(steps=20)
    save(rig, 20)
    compare(rig, 20)
    save(rig, 40)
    rig.at(*rig.members, step=40, committed=40)
    compare(rig, 40, odd="w1")
    rig.park(*rig.members, step=40)


def fails(rig: Rig, step: int) -> list[Doubt]:
    """The generation that is there trains and breaks; what the members of the next are told."""
    rig.join(*rig.members, step=step)
    rig.at(*rig.members, step=step + 1, committed=step + 1)
    lost, *others = rig.members
    rig.die(lost)
    rig.park(*others, step=step + 1)
    rig.ready(*(name for name in rig.names() if name not in (*others, lost)))
    (told,) = {tuple(join.resume.doubts) for join in rig.joins().values()}
    return list(told)


def test_a_doubt_is_told_to_each_generation_until_a_rank_has_said_that_it_is_settled() -> None:
    rig = Rig(HotSpare(spares=3))
    diverged(rig)
    assert {tuple(join.resume.doubts) for join in rig.joins().values()} == {((2, 20),)}
    assert fails(rig, 40) == [(2, 20)], "nobody has said that it is set aside"
    rig.control.on_message(rig.members[0], SetAside(doubts=[(2, 20)]))
    assert rig.events(Kind.DOUBTS_SETTLED) == [{"left": ()}]
    rig.control.on_message(rig.members[0], SetAside(doubts=[(2, 20)]))
    assert len(rig.events(Kind.DOUBTS_SETTLED)) == 1
    assert fails(rig, 50) == []


def test_who_takes_over_goes_on_doubting() -> None:
    rig = Rig(HotSpare(spares=3))
    diverged(rig)
    rig.join(*rig.members, step=40)
    for settles, expected in ((False, ((2, 20),)), (True, ())):
        if settles:
            rig.control.on_message(rig.members[0], SetAside(doubts=[(2, 20)]))
        known = past(log_of(rig))
        assert known.doubts == expected
        hands = FakeHands()
        hands.marks = dict(rig.hands.marks)
        control = Controller(HotSpare(spares=3), hands, world=4, steps=100, store_port=1)
        control.adopt(known, StateFrom.INITIAL)
        (number,) = {message.number for _, message in hands.sent if isinstance(message, Inquiry)}
        for name in rig.names():
            place: Any = "training" if name in rig.members else "waiting"
            control.on_message(
                name, Status(place=place, generation=2, step=40, valid=True, number=number)
            )
        control.on_exit(rig.members[0], "signal 9")
        for name in rig.members[1:]:
            rig_park(control, name)
        told = {
            tuple(message.resume.doubts) for _, message in hands.sent if isinstance(message, Join)
        }
        assert told == {expected}


def rig_park(control: Controller, name: str) -> None:
    from trainchaos.recovery.transport.wire import Parked

    control.on_message(
        name, Parked(generation=control.generation, step=40, valid=True, why="aborted", error="")
    )


def log_of(rig: Rig) -> list[Event]:
    """What was recorded, as another supervisor reads it."""
    events, generation = [], 0
    for seq, (kind, data) in enumerate(rig.hands.events):
        generation += kind is Kind.GENERATION_STARTED
        known = {"device": "cpu", "node": 0, **data}
        events.append(
            Event(
                kind=kind,
                actor="o",
                seq=seq,
                time_ns=seq,
                generation=generation,
                step=None,
                data=known,
            )
        )
    spawned = [
        Event(
            kind=Kind.PROCESS_SPAWNED,
            actor="o",
            seq=-1,
            time_ns=0,
            generation=0,
            step=None,
            data={"process": name, "role": role, "pid": 1, "mode": mode},
        )
        for name, role, mode in rig.hands.spawned
    ]
    return [*spawned, *events]


def test_a_second_divergence_adds_its_own_doubt() -> None:
    book = DigestBook()
    members = ("w0", "w1", "w2")
    for generation, agreed in ((1, 20), (2, 60)):
        book.began(generation, members, shards=1)
        book.formed(restored=None)
        for step, odd in ((agreed, False), (agreed + 20, True)):
            for name in members:
                book.note(name, generation, step, "odd" if odd and name == "w1" else "same")
    assert book.word.doubts == ((2, 20), (3, 60))
    book.began(3, members, shards=1)
    book.formed(restored=None)
    assert book.settled([(2, 20)]) and book.doubts == ((3, 60),)
    assert not book.settled([(2, 20)])


def test_doubts_are_kept_few() -> None:
    assert doubts.together([(2, 50), (3, 50), (3, 60), (1, 70)]) == ((3, 50),)
    many = [(number, 10 * number) for number in range(1, 100)]
    few = doubts.together(many)
    assert len(few) == doubts.MOST
    for generation in range(100):
        for step in range(0, 1000, 5):
            if doubts.in_doubt(many, generation=generation, step=step):
                assert doubts.in_doubt(few, generation=generation, step=step)


def test_a_checkpoint_of_no_name_goes_by_its_epoch(tmp_path: Path) -> None:
    rank = member(tmp_path, 1)
    rank.run(5)
    later = member(tmp_path, 2)  # another job, as far as anybody can tell
    later.saver.distrust([(2, 100)], deletes=True)
    assert restored(later) == "step-00000005"
    assert isinstance(checkpoints.newest_first(tmp_path)[0], Checkpoint)
