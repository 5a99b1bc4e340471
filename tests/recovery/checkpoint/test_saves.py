"""A save may fail at any point: training goes on, the failure is said, and the last good checkpoint
stays.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint import restore as restoring
from trainchaos.recovery.checkpoint import saves
from trainchaos.recovery.checkpoint.files import checkpoints
from trainchaos.recovery.checkpoint.files.checkpoints import Checkpoint, Disk, Hand
from trainchaos.recovery.checkpoint.files.saving import Saving
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.transport import atomic_rename

POINTS = (
    "mkdir 0",
    "write 0",
    "write 1",
    "write 2",
    "fsync 0",
    "fsync 1",
    "fsync 2",
    "rename 0",
    "fsync 3",
)


def state(step: int = 5) -> TrainState:
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    made = TrainState(
        model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), None, seed=7
    )
    made.step = step
    return made


class Breaking:
    """A disk that fails at its n-th operation of a kind."""

    def __init__(self, point: str, error: Exception) -> None:
        kind, number = point.split()
        self._kind, self._left, self._error = kind, int(number), error
        self.heard: list[str] = []

    def __call__(self, what: str, path: Path) -> None:
        self.heard.append(what)
        if what == self._kind:
            self._left -= 1
            if self._left == -1:
                raise self._error


def breaking(point: str, number: int = errno.EIO) -> Hand:
    return Hand(disk=Breaking(point, OSError(number, os.strerror(number))))


class Said:
    """What a rank that saves says."""

    def __init__(self) -> None:
        self.events: list[tuple[Kind, dict[str, Any]]] = []
        self.notes: list[Any] = []
        self.saving = Saving(write=self.write, send=self.notes.append, clock_s=lambda: 1.0)

    def write(self, kind: Kind, /, *, step: int | None = None, **data: Any) -> None:
        self.events.append((kind, data))

    def attempt(self, save: Callable[[], tuple[Checkpoint, int]]) -> bool:
        outcome = self.saving.attempt(5, save, since_s=self.saving.begin(5))
        self.saving.report(outcome)
        return outcome.bytes is not None


def good(directory: Path) -> int | None:
    found = checkpoints.newest_good(directory, lambda *_: None)
    return found[0].step if found else None


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("again", [False, True], ids=["new", "replaced"])
def test_a_save_that_fails_at_any_point_is_said_and_leaves_the_last_good_one(
    tmp_path: Path, point: str, again: bool
) -> None:
    old = state(5 if again else 4)
    saves.save(old, tmp_path, generation=1)
    disk = Breaking(point, OSError(errno.EIO, os.strerror(errno.EIO)))
    said = Said()
    assert not said.attempt(
        lambda: saves.save(state(), tmp_path, generation=2, hand=Hand(disk=disk))
    )
    assert [kind for kind, _ in said.events] == [Kind.CHECKPOINT_SAVING, Kind.CHECKPOINT_FAILED]
    assert "Input/output error" in said.events[-1][1]["error"]
    assert [note.state for note in said.notes] == ["saving", "failed"]
    assert "Input/output error" in said.notes[-1].error
    assert good(tmp_path) == old.step
    kept = checkpoints.newest_first(tmp_path)
    assert [c.step for c in kept] == [old.step]
    assert checkpoints.verify(kept[0])["generation"] == 1
    assert [path.name for path in tmp_path.iterdir()] == [kept[0].name]
    assert said.attempt(lambda: saves.save(state(), tmp_path, generation=2))
    assert good(tmp_path) == 5


def test_the_points_are_all_there_are(tmp_path: Path) -> None:
    disk = Breaking("mkdir 99", OSError())
    saves.save(state(), tmp_path, generation=1, hand=Hand(disk=disk))
    counts = {what: disk.heard.count(what) for what in dict.fromkeys(disk.heard)}
    named = {point.split()[0] for point in POINTS}
    assert named == set(counts)
    assert counts == {"mkdir": 1, "write": 3, "fsync": 4, "rename": 1}


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] unexpected pos 64 vs 0"),
        RuntimeError(""),
        OSError(),
        MemoryError(),
        ValueError("x\ny"),
        KeyError("z"),
    ],
    ids=repr,
)
def test_whatever_a_save_raises_is_one_line_and_no_more(error: Exception) -> None:
    said = Said()

    def save() -> tuple[Checkpoint, int]:
        raise error

    assert not said.attempt(save)
    text = said.events[-1][1]["error"]
    assert text.startswith(type(error).__name__) and "\n" not in text


@pytest.mark.parametrize("writers", [1, 2])
def test_a_mask_of_infinities_in_a_buffer_is_saved(tmp_path: Path, writers: int) -> None:
    """As attention has one, and large enough to be shared among writers; only what is learned must
    be finite.
    """
    masked, other = state(), state()
    for one in (masked, other):
        one.model.register_buffer("mask", torch.full((600, 600), float("-inf")).triu(1))
    other.model.mask.zero_()
    for writer in reversed(range(writers)):
        order = saves.SaveOrder(directory=tmp_path, generation=1, writer=writer, writers=writers)
        saves.write(order, saves.content_of(masked, writer, writers))
    restoring.load(other, restoring.prepared(other, checkpoints.newest_first(tmp_path)[0]))
    assert torch.equal(other.model.mask, masked.model.mask)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    spoilt = state()
    with torch.no_grad():
        spoilt.model.weight[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"not finite \(model.weight\)"):
        saves.save(spoilt, tmp_path, generation=1)
    assert not list(tmp_path.iterdir())


def test_where_names_cannot_be_exchanged_the_old_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(one: Path, other: Path) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    saves.save(state(), tmp_path, generation=1)
    monkeypatch.setattr(atomic_rename, "exchange", unsupported)
    with pytest.raises(OSError):
        saves.save(
            state(),
            tmp_path,
            generation=2,
            hand=Hand(disk=Breaking("fsync 3", OSError(errno.EIO, "x"))),
        )
    (kept,) = checkpoints.newest_first(tmp_path)
    assert checkpoints.verify(kept)["generation"] == 1
    saves.save(state(), tmp_path, generation=3)
    (kept,) = checkpoints.newest_first(tmp_path)
    assert checkpoints.verify(kept)["generation"] == 3
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_a_checkpoint_is_there_at_each_moment_of_its_replacement(tmp_path: Path) -> None:
    saves.save(state(), tmp_path, generation=1)
    seen: list[int | None] = []
    watch: Disk = lambda what, path: seen.append(good(tmp_path))  # noqa: E731
    saves.save(state(), tmp_path, generation=2, hand=Hand(disk=watch))
    assert set(seen) == {5}


def test_a_checkpoint_that_cannot_be_deleted_stays_whole_and_is_not_called_deleted(
    tmp_path: Path,
) -> None:
    for step in (1, 2, 3):
        saves.save(state(step), tmp_path, generation=1)
    said = Said()
    said.saving.prune(
        tmp_path,
        1,
        hand=Hand(disk=Breaking("delete 0", OSError(errno.EROFS, "Read-only file system"))),
    )
    assert [(kind, data.get("checkpoint")) for kind, data in said.events] == [
        (Kind.CHECKPOINT_KEPT, "step-00000002"),
        (Kind.CHECKPOINT_DELETED, "step-00000001"),
    ]
    assert [c.step for c in checkpoints.newest_first(tmp_path)] == [3, 2]
    checkpoints.verify(checkpoints.newest_first(tmp_path)[1])


def test_what_a_killed_save_left_is_swept_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".staging-step-00000004-1").mkdir()
    (tmp_path / ".deleted-step-00000001").mkdir()
    saves.save(state(), tmp_path, generation=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
