"""One writer in a checkpoint directory: a newer generation or job takes over, and nothing of an
older one follows.
"""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.recovery.checkpoint.test_checkpoint_safety import CHANGED
from tests.recovery.checkpoint.test_checkpointer import ALONE, Gate, Rank
from tests.recovery.checkpoint.test_checkpoints import put
from tests.support.running import LIMIT_S, Running, scripts
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.files import checkpoints, fence
from trainchaos.recovery.checkpoint.files.fence import FENCE, CheckpointFence, Fenced
from trainchaos.recovery.policy.interval import Wanted
from trainchaos.recovery.transport.wire import Unrecoverable


def taken(directory: Path, job: str = "one", generation: int = 1) -> CheckpointFence:
    made = CheckpointFence(directory, job)
    made.take(generation)
    return made


def says(directory: Path) -> tuple[int, int, str]:
    raw = json.loads((directory / FENCE).read_bytes())
    return raw["epoch"], raw["generation"], raw["job"]


# ---- the right


def test_each_generation_takes_it_from_the_one_before(tmp_path: Path) -> None:
    first = taken(tmp_path)
    with first.held():
        pass
    second = taken(tmp_path, generation=2)
    with pytest.raises(Fenced, match="generation 2 writes checkpoints"), first.held():
        raise AssertionError("it may not")
    with pytest.raises(Fenced):
        first.enter(1, takes=True)
    with pytest.raises(Fenced):
        CheckpointFence(tmp_path, "one").take(1)
    assert second.enter(2, takes=True) == 1
    assert says(tmp_path) == (1, 2, "one")


def test_a_job_that_another_followed_never_comes_back(tmp_path: Path) -> None:
    """Not in a later generation either, which it may form without having heard of anybody."""
    old = taken(tmp_path, "one", generation=7)
    taken(tmp_path, "two", generation=1)
    assert says(tmp_path) == (2, 1, "two")
    for act in (lambda: old.enter(7, takes=True), lambda: taken(tmp_path, "one", generation=8)):
        with pytest.raises(Fenced, match="another job writes checkpoints"):
            act()
    assert says(tmp_path) == (2, 1, "two")


def test_writers_of_parts_wait_for_rank_0_to_take_it(tmp_path: Path) -> None:
    part = CheckpointFence(tmp_path, "one")
    with pytest.raises(OSError, match="has not taken"):
        part.enter(1, takes=False)
    taken(tmp_path)
    assert part.enter(1, takes=False) == 1
    taken(tmp_path, generation=2)
    with pytest.raises(Fenced):
        part.enter(1, takes=False)
    other = CheckpointFence(tmp_path, "one")
    with pytest.raises(OSError, match="has not taken"):
        other.enter(3, takes=False)


def test_who_has_it_may_find_it_gone(tmp_path: Path) -> None:
    """Somebody has cleaned up, or a bit flipped."""
    holder = taken(tmp_path, generation=4)
    for spoil in (lambda: (tmp_path / FENCE).unlink(), lambda: (tmp_path / FENCE).write_text("{")):
        spoil()
        with holder.held():
            pass
        assert says(tmp_path) == (1, 4, "one")


def test_a_directory_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    made = taken(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")
    assert made.enter(1, takes=True) == 1
    with made.held():
        assert says(tmp_path / "saved") == (1, 1, "one")
    shutil.rmtree(tmp_path / "saved")
    (tmp_path / "saved").write_text("in the way")
    with pytest.raises(OSError, match="saved"):
        made.enter(1, takes=True)


def test_a_lost_file_begins_after_the_newest_checkpoint(tmp_path: Path) -> None:
    put(tmp_path, 10, epoch=5, generation=3)
    taken(tmp_path, "two")
    assert says(tmp_path) == (6, 1, "two")


def test_a_newer_writer_waits_for_a_rename_under_way_and_nothing_follows(tmp_path: Path) -> None:
    old, done = taken(tmp_path), threading.Event()
    newer = threading.Thread(target=lambda: (taken(tmp_path, generation=2), done.set()))
    with old.held():
        newer.start()
        assert not done.wait(0.05), "it has it only once the other is out"
    assert done.wait(LIMIT_S)
    newer.join(LIMIT_S)
    with pytest.raises(Fenced), old.held():
        pass


def test_a_writer_that_stands_still_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "LOCK_LIMIT_S", 0.02)
    old = taken(tmp_path)
    with old.held():
        newer = taken(tmp_path, generation=2)
        with pytest.raises(TimeoutError), newer.held():
            pass
    with newer.held():
        pass


def test_where_there_are_no_locks_the_looks_have_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    old = taken(tmp_path)
    taken(tmp_path, generation=2)
    with pytest.raises(Fenced), old.held():
        pass


# ---- who saves


def names(directory: Path) -> list[str]:
    """All but the fence itself."""
    return sorted(path.name for path in directory.iterdir() if "fence" not in path.name)


def member(directory: Path, generation: int, **config: object) -> Rank:
    made = Rank(directory, **config)
    made.saver.joined(0, ALONE, generation)
    return made


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_older_generation_neither_writes_nor_deletes(tmp_path: Path, mode: str) -> None:
    old = member(tmp_path, 1, saves={"mode": mode}, checkpoint_keep=1, job_id="one")
    old.run(5)
    old.saver.close()
    new = member(tmp_path, 2, checkpoint_keep=9, job_id="one")
    new.state.step = 5
    new.run(5)
    kept = names(tmp_path)
    heard: list[str] = []
    old.saver.disk = lambda what, path: heard.append(what)
    old.run(5)
    old.saver.close()
    assert (old.said(Kind.CHECKPOINT_COMMITTED), old.said(Kind.CHECKPOINT_FAILED)) == ([5], [10])
    assert "generation 2 writes checkpoints" in old.events[-1][1]["error"]
    assert (heard, names(tmp_path)) == ([], kept), "not a byte, and nothing is pruned or swept"
    assert kept == ["step-00000005", "step-00000010"]


def test_a_fenced_job_ends_when_it_would_recover(tmp_path: Path) -> None:
    member(tmp_path, 1, job_id="one")
    member(tmp_path, 1, job_id="two")
    late = Rank(tmp_path, job_id="one")
    with pytest.raises(Fenced):
        late.saver.joined(0, ALONE, 2)
    assert isinstance(late.notes[-1], Unrecoverable)


def test_what_a_newer_generation_is_writing_is_not_swept(tmp_path: Path) -> None:
    newer, older = (checkpoints.staging_of(tmp_path, 50, generation, 2) for generation in (3, 1))
    for path in (newer, older):
        path.mkdir()
    checkpoints.sweep(tmp_path, until=(2, 2))
    assert names(tmp_path) == [newer.name]


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Open in the end, whatever happens."""
    made = Gate()
    yield made
    made.opened.set()


def saving(directory: Path, gate: Gate) -> Rank:
    """A rank of generation 1 whose background save of step 5 is being written."""
    rank = member(directory, 1, saves={"mode": "async"}, job_id="one")
    rank.saver.disk = gate
    rank.run(6)
    assert gate.reached.wait(LIMIT_S)
    return rank


def test_a_rank_that_has_parked_commits_nothing(tmp_path: Path, gate: Gate) -> None:
    """A notice during a save in the background: the next generation begins without this rank."""
    rank = saving(tmp_path, gate)
    rank.saver.parked(lost=False)
    gate.opened.set()
    assert not rank.saver._writer.background.wait(0.05), "what is written waits for its name"
    assert checkpoints.newest_first(tmp_path) == []
    member(tmp_path, 2, job_id="one")
    rank.saver.close()  # told to stop
    assert checkpoints.newest_first(tmp_path) == []
    assert (rank.said(Kind.CHECKPOINT_COMMITTED), rank.said(Kind.CHECKPOINT_FAILED)) == ([], [5])


def test_a_rank_that_saves_in_the_next_generation_too_commits_what_it_was_saving(
    tmp_path: Path, gate: Gate
) -> None:
    rank = saving(tmp_path, gate)
    rank.saver.parked(lost=True)
    gate.opened.set()
    rank.saver.joined(0, ALONE, 2)
    rank.saver.close()
    assert rank.said(Kind.CHECKPOINT_COMMITTED) == [5]


@pytest.mark.parametrize(("rank_then", "generation"), [(1, 2), (0, 4)])
def test_but_not_as_another_rank_nor_generations_later(
    tmp_path: Path, gate: Gate, rank_then: int, generation: int
) -> None:
    rank = saving(tmp_path, gate)
    rank.saver.parked(lost=True)
    gate.opened.set()
    rank.saver.joined(rank_then, ALONE, generation)
    rank.saver.close()
    assert (rank.said(Kind.CHECKPOINT_COMMITTED), rank.said(Kind.CHECKPOINT_FAILED)) == ([], [5])


def test_what_has_its_name_is_said_before_the_rank_parks(tmp_path: Path) -> None:
    rank = member(tmp_path, 1, saves={"mode": "async"}, job_id="one")
    slow = threading.Event()
    rank.saver.disk = lambda what, path: (
        slow.wait(0.02) if (what, path) == ("fsync", tmp_path) else None
    )
    rank.run(5)
    assert rank.saver._writer._placed.wait(LIMIT_S)
    rank.saver.parked(lost=False)
    assert rank.said(Kind.CHECKPOINT_COMMITTED) == [5], (
        "nothing is said for a generation that is over"
    )


def test_a_disk_that_takes_nothing_at_the_join_is_tried_again_at_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = member(tmp_path, 1, job_id="one")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFence, "_write", full)
        rank.saver.joined(0, ALONE, 2)
    rank.saver.began(0)
    rank.state.step = 4
    rank.saver.wants(5)
    rank.state.step = 5
    rank.saver.after_commit(5, rank=0, layout=ALONE, generation=2, asked=Wanted(disk=True))
    assert (rank.said(Kind.CHECKPOINT_COMMITTED), says(tmp_path)) == ([5], (1, 2, "one"))


# ---- lineage


def test_a_job_that_begins_anew_restores_nothing_of_the_one_before(tmp_path: Path) -> None:
    old = member(tmp_path, 1, job_id="one")
    old.run(50)
    new = member(tmp_path, 1, job_id="two", fresh=True)
    assert new.saver.restore(None, ALONE) is None  # type: ignore[arg-type]
    new.saver.began(0)
    new.run(5)
    assert new.saver.restore(None, ALONE) == "step-00000005"  # type: ignore[arg-type]
    following = member(tmp_path, 1, job_id="three")
    assert following.saver.restore(None, ALONE) == "step-00000005", "what came last counts"  # type: ignore[arg-type]


def test_of_memory_and_disk_the_later_generation_is_taken_whatever_its_step(tmp_path: Path) -> None:
    rank = member(tmp_path, 1, job_id="one")
    rank.run(5)
    (five,) = checkpoints.newest_first(tmp_path)
    wanted = rank.saver._custody.choosing.wanted
    assert wanted(None, five) and wanted((1, 4), five)
    assert not wanted((1, 5), five) and not wanted((2, 3), five), "memory has a later one"
    wanted = member(tmp_path, 1, job_id="two").saver._custody.choosing.wanted
    assert wanted(None, five) and not wanted((1, 3), five), "an earlier job's"


# ---- for real


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts jobs that share a checkpoint directory; none outlives the test."""
    script = CHANGED.replace("steps=120", "steps=int(sys.argv[3])")
    with scripts(tmp_path, script) as begin:
        yield lambda *options, steps: begin(options, 0, steps)


@pytest.mark.real
@pytest.mark.long
def test_two_jobs_in_one_directory_do_not_spoil_each_others_checkpoints(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    first = start("--every", "10", "--keep", "2", steps=100_000)
    first.wait_for(lambda: first.trained(25))
    second = start("--every", "10", "--keep", "2", steps=2_000)
    assert second.end() == 0, second.said
    ready = second.of("orchestrator", Kind.GENERATION_READY)[0]
    assert ready.data["checkpoint"], "it goes on from what the first had saved"
    (finished,) = second.of("orchestrator", Kind.RUN_FINISHED)
    saves = first.of("w0", Kind.CHECKPOINT_COMMITTED)
    assert saves[-1].time_ns < ready.time_ns < finished.time_ns, (
        "the first saved nothing after the second had begun"
    )
    assert first.process.poll() is None, "and trains on"
    kept = checkpoints.newest_first(tmp_path / "checkpoints")
    assert kept[0].step == 2_000
    assert {checkpoints.verify(c)["epoch"] for c in kept if c.step > (ready.step or 0)} == {2}
    first.process.terminate()
    assert first.end() == 143
    assert "another job writes checkpoints in" in first.said
