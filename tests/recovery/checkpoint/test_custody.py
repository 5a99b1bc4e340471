"""What a rank may do with the checkpoints of its job: who writes, what is in doubt, and that
nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.recovery.rank.test_job import Rank
from tests.recovery.rank.test_membership import Either, Simulated, join
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.fault.targets import DiskTrouble
from trainchaos.harness.sim.rank.saves import JOB
from trainchaos.recovery.checkpoint.checkpointer import NothingToRestore
from trainchaos.recovery.checkpoint.files.checkpoints import (
    FREE,
    Checkpoint,
    Hand,
    name_of,
    newest_first,
    origin_of,
)
from trainchaos.recovery.checkpoint.files.custody import Custody, agreement, writers
from trainchaos.recovery.checkpoint.files.fence import CheckpointFence, Fenced
from trainchaos.recovery.checkpoint.files.retention import Agreement
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.transport.wire import (
    Abort,
    CheckpointNote,
    Finished,
    Joined,
    Message,
    Parked,
    SetAside,
    Unrecoverable,
)

DOUBTS = [(3, 40)]


class Disk:
    """Stands for ``recovery.checkpoint.files.saving.Saving``. ``answers``: what becomes of each try
    to set something aside.
    """

    def __init__(self) -> None:
        self.answers: list[bool | Exception] = []

    def set_aside(self, directory: Path, in_doubt: Any, why: str, hand: Hand) -> bool:
        """As scripted."""
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Rig:
    """A custody, and what it says."""

    def __init__(self, directory: Path | None, **more: Any) -> None:
        self.said: list[Any] = []
        self.events: list[tuple[Kind, str]] = []
        self.disk = Disk()
        about: dict[str, Any] = {"job": "a", "fresh": False} | more
        self.custody = Custody(
            directory,
            saving=self.disk,
            write=self._write,
            send=self.said.append,
            **about,  # type: ignore[arg-type]
        )

    def _write(self, kind: Kind, /, **data: Any) -> None:
        self.events.append((kind, data["checkpoint"]))

    def put_aside(self, *answers: bool | Exception) -> None:
        """Try, and the disk answers so."""
        self.disk.answers = list(answers)
        self.custody.put_aside(FREE)
        assert not self.disk.answers, "it was not even tried"


# --- who writes


def test_rank_0_of_the_newest_generation_may_write_and_nobody_else(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.custody.joined(0, 1)
    fence = rig.custody.fence
    assert fence is not None and fence.enter(1, takes=False) == 1
    rig.custody.joined(1, 2)
    with pytest.raises(OSError, match="rank 0 of generation 2 has not taken"):
        fence.enter(2, takes=False)


@pytest.mark.parametrize(("rank", "generation", "gives_up"), [(0, 3, 0), (0, 5, 1), (1, 3, 1)])
def test_a_save_that_waits_for_its_name_is_given_up_unless_its_writer_goes_straight_on(
    rank: int, generation: int, gives_up: int, tmp_path: Path
) -> None:
    rig = Rig(tmp_path)
    rig.custody.joined(0, 2)
    fence = rig.custody.fence
    assert fence is not None
    before = fence.tenure
    rig.custody.joined(rank, generation)
    assert fence.tenure - before == gives_up


def test_whoever_finds_somebody_newer_there_ends_the_job_and_says_why(tmp_path: Path) -> None:
    Rig(tmp_path, job="b").custody.joined(0, 1)
    rig = Rig(tmp_path)
    rig.custody.joined(0, 1)
    old = Rig(tmp_path, job="b")
    with pytest.raises(Fenced):
        old.custody.joined(0, 2)
    (said,) = old.said
    assert isinstance(said, Unrecoverable) and "another job writes" in said.error


@pytest.mark.parametrize(
    ("layout", "sharded", "who"),
    [
        (Layout(world=4), False, [0]),
        (Layout(world=4), True, [0, 1, 2, 3]),
        (Layout(world=4, shards=2), False, [0, 1]),
        (Layout(world=4, shards=2), True, [0, 1]),
    ],
)
def test_a_part_is_written_by_the_first_replica_or_by_all_that_share(
    layout: Layout, sharded: bool, who: list[int]
) -> None:
    assert list(writers(layout, sharded=sharded)) == who


@pytest.mark.parametrize(
    ("every", "world", "shards", "known"),
    [
        (None, 4, 1, Agreement(step=7)),
        (5, 4, 2, Agreement(step=7, every=5)),
        (0, 4, 1, None),
        (None, 4, 4, None),
    ],
)
def test_retention_waits_for_an_agreement_where_replicas_are_compared(
    every: int | None, world: int, shards: int, known: Agreement | None
) -> None:
    assert agreement(7, every=every, world=world, shards=shards) == known


# --- what is in doubt


def test_what_is_in_doubt_is_tried_again_until_it_is_out_of_the_way_and_that_is_said_once(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    rig.custody.distrust(DOUBTS, deletes=True)
    rig.put_aside(False)
    rig.put_aside(OSError(30, "Read-only file system"))
    rig.put_aside(Fenced("somebody newer writes"))
    assert rig.said == []
    rig.put_aside(True)
    assert rig.said == [SetAside(doubts=DOUBTS)]
    rig.put_aside()
    rig.custody.distrust([], deletes=True)
    rig.put_aside()
    assert len(rig.said) == 1 and rig.custody.choosing.doubts == tuple(DOUBTS), (
        "it is restored no more than before"
    )


@pytest.mark.parametrize("directory", [True, False])
def test_what_is_held_in_memory_counts_too(directory: bool, tmp_path: Path) -> None:
    told: list[Any] = []
    answers = iter([False, True])

    def forget(doubts: Any) -> bool:
        told.append(doubts)
        return next(answers)

    rig = Rig(tmp_path if directory else None, forget=forget)
    rig.custody.distrust(DOUBTS, deletes=True)
    rig.put_aside(*[True] * directory)
    assert rig.said == []
    rig.put_aside(*[True] * directory)
    assert rig.said == [SetAside(doubts=DOUBTS)] and told == [tuple(DOUBTS)] * 2


# --- that nothing is left


def bad(tmp_path: Path, step: int) -> Checkpoint:
    """One that does not verify."""
    path = tmp_path / name_of(step)
    path.mkdir()
    return Checkpoint(path=path, step=step)


def test_a_refusal_is_said_once_in_a_restore(tmp_path: Path) -> None:
    rig, one = Rig(tmp_path), bad(tmp_path, 3)
    for _ in range(2):
        rig.custody.refused(one, "torn")
    assert rig.events == [(Kind.CHECKPOINT_REFUSED, one.name)]
    rig.custody.restoring()
    rig.custody.refused(one, "torn")
    assert len(rig.events) == 2


@pytest.mark.parametrize(
    ("spoil", "anew", "fresh", "what"),
    [
        (lambda rig, path: None, True, True, None),
        (lambda rig, path: None, False, True, "nothing is left to restore"),
        (lambda rig, path: None, True, False, "; this process no longer holds the initial state"),
        (
            lambda rig, path: rig.custody.refused(bad(path, 3), "torn"),
            True,
            True,
            ": step-00000003 may not be used",
        ),
        (
            lambda rig, path: (path / "doubtful-step-00000009-1-2").mkdir(),
            True,
            True,
            "9-1-2 may not be used",
        ),
    ],
)
def test_initial_values_will_do_only_where_there_never_was_a_checkpoint(
    spoil: Callable[[Rig, Path], Any], anew: bool, fresh: bool, what: str | None, tmp_path: Path
) -> None:
    rig = Rig(tmp_path)
    spoil(rig, tmp_path)
    error = rig.custody.nothing_left(anew=anew, fresh=fresh)
    if what is None:
        assert error is None and rig.said == []
    else:
        assert error is not None and what in error and rig.said == [Unrecoverable(error=error)]


# --- a real rank and a simulated one go by it


def story(rank: Either, deletes: Callable[[bool], None]) -> Iterator[Message]:
    """What it says in the course of six generations. ``deletes``: whether the disk does from now
    on.
    """

    def generation(number: int, *words: type[Message], **order: Any) -> Iterator[Message]:
        rank.join(number, **order)
        yield from map(rank.hear, words)

    def ends(number: int) -> Iterator[Message]:
        rank.tell(Abort(generation=number))
        yield rank.hear(Parked)

    def spoil(names: str) -> None:
        for file in (rank.directory / "checkpoints").glob(f"{names}/*.bin"):
            file.write_bytes(b"")

    yield from generation(1, Joined, Finished)
    yield from ends(1)
    deletes(False)
    yield from generation(2, Joined, Finished, doubts=[(2, 3)])
    yield from ends(2)
    deletes(True)
    yield from generation(3, SetAside, Joined, Finished, doubts=[(2, 3)])
    yield from ends(3)
    yield from generation(4, Joined, Finished, restore=True)
    yield from ends(4)
    spoil("step-00000006")
    yield from generation(5, Joined, Finished, restore=True)
    yield from ends(5)
    spoil("step-*")
    yield from generation(6, Unrecoverable, restore=True)


OF_CHECKPOINTS = (
    Kind.CHECKPOINT_SAVING,
    Kind.CHECKPOINT_COMMITTED,
    Kind.CHECKPOINT_REFUSED,
    Kind.CHECKPOINT_DELETED,
    Kind.CHECKPOINT_KEPT,
    Kind.CHECKPOINT_SET_ASIDE,
)


def told(rank: Either, deletes: Callable[[bool], None]) -> tuple[list[str], list[Any], list[Any]]:
    """The story of a rank: what it says, what it says of checkpoints in between, and what it logs
    of them.
    """
    # a simulated rank says none, so that logs of one seed are the same
    where = f" in {rank.directory / 'checkpoints'}"
    said = [str(message).replace(where, "") for message in story(rank, deletes)]
    logged = [
        (e.kind, e.generation, e.step, e.data["checkpoint"]) for e in rank.events(*OF_CHECKPOINTS)
    ]
    return said, rank.notes, logged


@pytest.mark.slow
def test_a_real_rank_and_a_simulated_one_do_the_same_with_their_checkpoints(tmp_path: Path) -> None:
    simulated = Simulated(tmp_path / "simulated")
    trouble = DiskTrouble(error="EIO", operations=("delete",))

    def simulated_deletes(does: bool) -> None:
        simulated.rank.faults.disk.set_troubles([] if does else [(trouble, 0)])

    (tmp_path / "real").mkdir()
    real = Rank(tmp_path / "real")
    broken = [False]

    def disk(what: str, path: Path) -> None:
        if what == "delete" and broken[0]:
            raise OSError(5, "Input/output error")

    def real_deletes(does: bool) -> None:
        broken[0] = not does

    real.job.checkpoints.disk = disk
    try:
        said, notes, logged = told(real, real_deletes)
        real.end()
    finally:
        real.channel.close()
    assert (said, notes, logged) == told(simulated, simulated_deletes)
    assert isinstance(real.error, NothingToRestore) and not simulated.process.running
    assert [kind for kind, *_ in logged].count(Kind.CHECKPOINT_REFUSED) == 3
    assert [(note.state, note.step) for note in notes] == [
        (state, step) for step in (3, 6, 6, 6) for state in ("saving", "committed")
    ]


def test_a_simulated_rank_tries_again_at_its_next_save(tmp_path: Path) -> None:
    rank = Simulated(tmp_path / "rank", steps=30)
    rank.join(1)
    rank.hear(Joined)
    while rank.hear(CheckpointNote).state != "committed":
        pass
    rank.tell(Abort(generation=1))
    rank.hear(Parked)
    rank.rank.faults.disk.set_troubles([(DiskTrouble(error="EIO", operations=("delete",)), 0)])
    rank.tell(join(2, doubts=[(2, 0)]))
    rank.hear(Joined)
    assert list((tmp_path / "rank" / "checkpoints").glob("step-*"))
    rank.rank.faults.disk.set_troubles([])
    assert rank.hear(SetAside) == SetAside(doubts=[(2, 0)])
    assert list((tmp_path / "rank" / "checkpoints").glob("doubtful-step-*"))


def test_a_simulated_rank_ends_where_somebody_newer_writes(tmp_path: Path) -> None:
    """As a real one does: it says so, and fails."""
    rank = Simulated(tmp_path / "rank")
    CheckpointFence(tmp_path / "rank" / "checkpoints", JOB).take(7)
    ended: list[int | None] = []
    rank.process.on_end = lambda code, signum: ended.append(code)
    rank.join(1)
    assert "generation 7 writes" in rank.hear(Unrecoverable).error
    assert ended == [1] and not rank.process.running


def test_what_simulated_ranks_save_names_their_job(tmp_path: Path) -> None:
    """So that it is known for theirs though the right to write, whose number says so too, was not
    to be had.
    """
    rank = Simulated(tmp_path / "rank")
    rank.join(1)
    rank.hear(Joined)
    rank.hear(Finished)
    saved = newest_first(tmp_path / "rank" / "checkpoints")
    assert saved and {origin.job for origin in map(origin_of, saved) if origin} == {JOB}
    assert not rank.rank.checkpoints.choosing.in_doubt(saved[0])
    rank.rank.checkpoints.choosing.doubts = ((2, 0),)
    rank.rank.checkpoints._fence.give_up()
    assert rank.rank.checkpoints.choosing.in_doubt(saved[0])
    rank.stop()
