"""Whoever saves, deletes, or waits for a save is in the checkpoint phase, and shows a sign of life
as it gets on, however large the state is; whoever waits for a part that will not come gives up at
once.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.recovery.checkpoint.memory import test_memory_state as states
from tests.recovery.checkpoint.memory.test_memory_state import keeper_named, trained
from tests.recovery.checkpoint.test_checkpointer import Gate, Rank, gate, left
from tests.support.running import LIMIT_S
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint import background, saves
from trainchaos.recovery.checkpoint import restore as restoring
from trainchaos.recovery.checkpoint.background import BackgroundWorker, Snapshot
from trainchaos.recovery.checkpoint.chunks import chunks_of
from trainchaos.recovery.checkpoint.files import checkpoints, retention
from trainchaos.recovery.checkpoint.files.fence import CheckpointFence, Fenced
from trainchaos.recovery.checkpoint.files.saving import SaveOutcome
from trainchaos.recovery.checkpoint.memory import header
from trainchaos.recovery.policy.jobconfig import InMemory
from trainchaos.recovery.state import strides
from trainchaos.recovery.state.fingerprint import fingerprint
from trainchaos.recovery.transport import atomic_rename

__all__ = ["gate"]
STRIDE = 1 << 10


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strides for which the states of tests are large."""
    monkeypatch.setattr(strides, "STRIDE_BYTES", STRIDE)


@pytest.fixture
def keeper() -> Iterator[str]:
    name = "signs-" + secrets.token_hex(8)
    kept = keeper_named(name)
    yield name
    kept.close()


class Signs:
    """Counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


# ---- strides


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(5000.0),
        torch.arange(6000.0).reshape(3, 2000),
        torch.arange(6000.0).reshape(2000, 3).t(),
        torch.arange(8192.0).reshape(1, 2, 64, 64).transpose(2, 3),
        torch.tensor(3.0),
        torch.empty(0, 7),
        torch.arange(3000, dtype=torch.int16),
    ],
    ids=lambda t: f"{list(t.shape)}{'' if t.is_contiguous() else ', not in order'}",
)
def test_strides_cover_a_tensor_once_and_are_short(tensor: torch.Tensor) -> None:
    signs, into = Signs(), torch.full_like(tensor, 7)
    strides.copy(into, tensor, signs)
    assert torch.equal(into, tensor)
    parts = [part for (part,) in strides.strides(tensor)]
    assert sum(part.numel() for part in parts) == tensor.numel()
    assert max(part.numel() * part.element_size() for part in parts) <= STRIDE
    assert signs.count >= tensor.numel() * tensor.element_size() / STRIDE
    host = strides.on_host(tensor, signs)
    assert torch.equal(host, tensor) and host.is_contiguous()


# ---- copies of a large state


@pytest.mark.usefixtures("small")
def test_a_copy_into_host_memory_shows_progress_within_each_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "BLOCK_BYTES", 3 * STRIDE)
    state, signs, snapshot = trained(2, width=400), Signs(), Snapshot()
    chunks = chunks_of(state.tensors())
    size = sum(chunk.bytes for chunk in chunks)
    for _ in range(2):
        before, copies = signs.count, snapshot.take(chunks, signs)
        assert all(torch.equal(one.data, two.data) for one, two in zip(copies, chunks, strict=True))
        assert signs.count - before >= size / STRIDE
    with torch.no_grad():
        state.model[0].weight.add_(1)
    assert not all(torch.equal(one.data, two.data) for one, two in zip(copies, chunks, strict=True))


@pytest.mark.usefixtures("small")
def test_a_memory_checkpoint_shows_progress_within_each_tensor(
    keeper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(header, "RANGE_BYTES", 4096)
    state, signs = trained(2, width=400), Signs()
    size = sum(chunk.bytes for chunk in chunks_of(state.tensors()))
    rank = states.Rank(state, name=keeper, progress=signs)
    rank.begin()
    assert signs.count >= size / STRIDE + size / 4096, "for its memory, and for the copy"
    assert not rank.save()["error"]
    other, signs.count = trained(1, width=400), 0
    assert states.Rank(other, "w1", name=keeper, progress=signs).restore()
    assert signs.count >= 4, "with each piece, checked and loaded"


def test_a_restore_shows_progress_within_a_tensor_that_others_had_cut_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, signs = trained(2, width=400), Signs()
    saves.save(state, tmp_path, generation=1)
    monkeypatch.setattr(strides, "STRIDE_BYTES", STRIDE)
    reading = restoring.prepared(
        trained(1, width=400), checkpoints.newest_first(tmp_path)[0], signs
    )
    into = torch.zeros(4 * STRIDE, dtype=torch.uint8)
    reading._boxes.append((torch.ones(4 * STRIDE, dtype=torch.uint8), into))
    reading.load()
    assert into.all() and signs.count >= 4


@pytest.mark.usefixtures("small")
def test_digests_show_progress_and_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    state, signs = trained(2, width=400), Signs()
    size = sum(t.numel() * t.element_size() for t in state.tensors().values())
    found = state.digests(signs), fingerprint(state, signs)
    assert signs.count >= 2 * size / STRIDE
    monkeypatch.undo()
    assert found == (state.digests(), fingerprint(state))


# ---- on disk


@pytest.mark.usefixtures("small")
def test_a_save_shows_progress_in_all_that_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_rename, "RANGE_BYTES", 4096)
    state, signs = trained(2, width=400), Signs()
    size = sum(chunk.bytes for chunk in chunks_of(state.tensors()))
    order = saves.SaveOrder(directory=tmp_path, generation=1, hand=checkpoints.Hand(progress=signs))
    saves.write(order, saves.content_of(state))
    assert signs.count >= size / STRIDE + size / 4096, "the look for NaN, and the sync"


def test_what_a_link_leads_to_is_not_deleted_with_it(tmp_path: Path) -> None:
    """Whatever the order in which a directory's entries come."""
    kept = tmp_path / "elsewhere" / "kept"
    kept.parent.mkdir()
    kept.write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "away").symlink_to(kept.parent)
    (tmp_path / "alone").symlink_to(kept.parent)
    atomic_rename.remove(tmp_path / "full")
    atomic_rename.remove(tmp_path / "alone")
    assert kept.read_text() == "x" and sorted(os.listdir(tmp_path)) == ["elsewhere"]


def test_each_entry_that_is_deleted_is_a_sign_of_life(tmp_path: Path) -> None:
    signs, full = Signs(), tmp_path / "full"
    for name in ("a", "b", "deep/c", "deep/d"):
        (full / name).parent.mkdir(parents=True, exist_ok=True)
        (full / name).write_text("x")
    (full / "away").symlink_to(tmp_path)
    atomic_rename.remove(full, signs)
    assert (signs.count, tmp_path.exists(), full.exists()) == (7, True, False)
    atomic_rename.remove(tmp_path / "nothing", signs)


def test_retention_and_sweeping_show_progress(tmp_path: Path) -> None:
    state = trained(1)
    for step in (1, 2, 3):
        state.step = step
        saves.save(state, tmp_path, generation=1)
    signs = Signs()
    gone = retention.prune(tmp_path, 1, hand=checkpoints.Hand(progress=signs))
    entries = 3  # the data, the manifest, the directory
    assert (len(gone.gone), signs.count >= 2 * entries) == (2, True)
    signs.count = 0
    retention.set_aside(tmp_path, lambda _: True)
    (tmp_path / ".staging-step-00000009-0-1").mkdir()
    checkpoints.sweep(tmp_path, progress=signs)
    assert signs.count == 1


# ---- waiting for a save


def test_whoever_waits_for_a_save_shows_progress_as_the_save_does() -> None:
    work, go, seen = BackgroundWorker(), threading.Semaphore(0), Signs()

    def write() -> SaveOutcome:
        for _ in range(5):
            work.moved()
            assert go.acquire(timeout=LIMIT_S)
        return SaveOutcome(step=1)

    def progress() -> None:
        seen()
        go.release()

    work.start(write)
    go.release()  # whatever it did before anybody waited is no progress of the wait
    assert work.wait(LIMIT_S, progress)
    assert 4 <= seen.count <= 5


def test_a_wait_for_the_save_before_belongs_to_the_checkpoint(tmp_path: Path, gate: Gate) -> None:
    """As at a notice: the save under way is waited for, then the one that was asked for is made."""
    phases: list[bool] = []
    rank = Rank(tmp_path, saves={"mode": "async"})
    rank.saver.disk = gate
    rank.saves = lambda: (
        phases.append(rank.saver._writer.background.busy),
        gate.opened.set() if len(phases) > 1 else None,
    )
    rank.run(5)
    assert gate.reached.wait(LIMIT_S) and phases == [False]
    rank.step(pausing=True)
    assert phases == [False, True], "before it waits"
    assert rank.said(Kind.CHECKPOINT_COMMITTED) == [5, 6]


def test_a_save_is_not_begun_while_one_stands_still(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainchaos.recovery.checkpoint.save_writer.END_S", 0.01)
    rank = Rank(tmp_path, saves={"mode": "async"})
    rank.saver.disk = gate
    rank.run(5)
    assert gate.reached.wait(LIMIT_S)
    rank.step(pausing=True)
    assert [data["error"] for kind, data in rank.events if kind is Kind.CHECKPOINT_FAILED] == [
        "the save before has not ended"
    ]
    gate.opened.set()
    assert rank.saver._writer.background.wait(LIMIT_S)


def test_a_state_that_does_not_fit_into_memory_twice_is_not_saved_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(background, "_memory", full)
    rank = Rank(tmp_path, saves={"mode": "async"})
    rank.run(6)
    assert rank.said(Kind.CHECKPOINT_FAILED) == [5] and "Cannot allocate" in rank.notes[-1].error


def test_a_memory_checkpoint_is_made_in_the_checkpoint_phase(tmp_path: Path, keeper: str) -> None:
    said: list[int] = []
    memory = InMemory(every=2, socket=keeper, job="job")
    rank = Rank(tmp_path, memory=memory, checkpoint_every=100)
    rank.saves = lambda: said.append(
        len([1 for kind, _ in rank.events if kind is Kind.CHECKPOINT_SAVING])
    )
    rank.run(4)
    assert said == [0, 1], "before each, and at no other step"
    rank.saver.close()


# ---- parts that will not come


def orders(directory: Path, enters: Callable[[], int], **more: Any) -> Callable[[int], Any]:
    def write(writer: int) -> Any:
        order = saves.SaveOrder(
            directory=directory,
            generation=3,
            writer=writer,
            writers=2,
            enter=enters if writer else lambda: 1,
            **more,
        )
        return saves.write(order, saves.content_of(trained(1, width=8), writer, 2))

    return write


def refused() -> int:
    raise Fenced("generation 4 writes checkpoints now")


@pytest.mark.parametrize("job", ["", "a/b"])
def test_rank_0_does_not_wait_for_a_part_that_the_fence_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str
) -> None:
    monkeypatch.setattr(saves, "PARTS_TIMEOUT_S", LIMIT_S / 5)
    write = orders(tmp_path, refused, job=job)
    with pytest.raises(Fenced):
        write(1)
    with pytest.raises(RuntimeError, match="writer 1 gave up: generation 4 writes"):
        write(0)
    assert left(tmp_path) == []


def test_a_refusal_of_another_save_or_another_job_says_nothing_of_this_one(tmp_path: Path) -> None:
    with pytest.raises(Fenced):
        orders(tmp_path, refused, job="other")(1)
    write = orders(tmp_path, lambda: 1, job="mine")
    done = [write(1), write(0)]
    assert done[1] is not None
    checkpoints.sweep(tmp_path)
    assert left(tmp_path) == ["step-00000001"]


def test_rank_0_that_may_not_write_any_more_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saves, "STILL_S", 0.0)
    mine, other = CheckpointFence(tmp_path, "mine"), CheckpointFence(tmp_path, "other")
    mine.take(1)
    mine.look(1)
    other.take(1)
    with pytest.raises(Fenced):
        orders(tmp_path, refused, still=lambda: mine.look(1))(0)
    assert left(tmp_path) == []


class Clock:
    """In place of the time module: each sleep takes a second, and then something happens."""

    def __init__(self, then: Callable[[int], None]) -> None:
        self.now = 0
        self._then = then

    def monotonic(self) -> float:
        return float(self.now)

    def sleep(self, _: float) -> None:
        self.now += 1
        self._then(self.now)


@pytest.mark.parametrize("grows", [True, False])
def test_a_part_is_waited_for_while_it_grows_or_its_writer_gets_on_however_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    """As it is hashed and found to be the same, or synced to a slow disk."""
    part, signs, setting = tmp_path / "rank-0001.bin", Signs(), os.utime
    part.write_bytes(b"x")

    def get_on(now: int) -> None:
        if now <= 300 and grows:
            part.write_bytes(b"x" * now)
        elif now <= 300:
            shown()

    clock = Clock(get_on)
    monkeypatch.setattr(saves, "time", clock)
    monkeypatch.setattr(os, "utime", lambda path: setting(path, ns=(clock.now, clock.now)))
    shown = saves.PartProgress(part, signs)
    with pytest.raises(TimeoutError, match="the part of writer 1 did not come within 120 s"):
        saves.gather(saves.SaveOrder(directory=tmp_path, generation=1, writers=2), tmp_path, 5)
    assert 420 <= clock.now <= 424 and signs.count == (0 if grows else 300)


def test_a_part_shows_outside_that_it_gets_on_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[object] = []
    monkeypatch.setattr(os, "utime", touched.append)
    monkeypatch.setattr(saves, "SHOW_S", 0.0)
    state = trained(1, width=400)
    order = saves.SaveOrder(directory=tmp_path, generation=3, writer=1, writers=2)
    written = saves.write(order, saves.content_of(state))
    assert written is None and touched and set(touched) == {next(tmp_path.glob(".*/rank-0001.bin"))}
    shown, count = saves.PartProgress(tmp_path, Signs()), len(touched)
    monkeypatch.setattr(saves, "SHOW_S", 3600.0)
    shown()
    shown()
    assert len(touched) == count + 1
