"""Checkpoints told by what happens to files, whatever their names are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainchaos.harness.draft.files import (
    SURE,
    Changes,
    FileHistory,
    kept,
    named_checkpoints,
    places,
)

STEPS = range(1, 41)
BYTES = bytes(range(256)) * 20
Write = Callable[[Path, int], object]
"""Writes what a script writes after a step."""


def played(folder: Path, write: Write, *, every: int = 10) -> dict[Path, FileHistory]:
    """A job that writes after some steps, looked at after each."""
    changes = Changes([folder])
    for step in STEPS:
        if step % every == 0:
            write(folder, step)
        changes.look(float(step), at_once=True)
    return changes.files


def _directory(folder: Path, step: int) -> None:
    (folder / f"step_{step}").mkdir()
    (folder / f"step_{step}" / "rank0").write_bytes(b"\0 few")


def _renamed(folder: Path, step: int) -> None:
    (folder / "new").write_bytes(BYTES + bytes([step]) * (step % 3))
    (folder / "new").rename(folder / "last")


def _appended(folder: Path, step: int) -> None:
    with open(folder / "trace", "ab") as stream:
        stream.write(BYTES)


@pytest.mark.parametrize(
    ("write", "log_size", "told"),
    [
        (_directory, 1000, ("surely", "step_10/rank0")),
        (lambda at, n: (at / f"w{n:06d}").write_bytes(b"\0"), 1000, ("surely", "w000010")),
        (lambda at, n: (at / f"w{n:06d}").write_text("{}"), 1000, ("probably", "w000010")),
        (_renamed, 1000, ("probably", "last")),
        (_renamed, 10**6, ("perhaps", "last")),
        (lambda at, n: n == 20 and (at / "once").write_bytes(BYTES), 1000, ("perhaps", "once")),
        (lambda at, n: (at / "small").write_bytes(bytes([0, n])), 1000, ("perhaps", "small")),
        (lambda at, n: (at / "state.json").write_text(f"[{n}]"), 1000, None),
        (lambda at, n: (at / f"plot_{n}.png").write_bytes(BYTES), 1000, None),
        (lambda at, n: (at / "train.log").write_bytes(BYTES), 1000, None),
        (_appended, 1000, None),
    ],
)
def test_a_checkpoint_is_told_by_what_changes(
    tmp_path: Path, write: Write, log_size: int, told: tuple[str, str] | None
) -> None:
    found = kept(played(tmp_path, write), steps=STEPS, first_s=1.0, log_size=log_size)
    said = [(SURE[one.grade].split()[0], str(one.paths[0].relative_to(tmp_path))) for one in found]
    assert said[:1] == ([told] if told else [])


def test_what_came_before_the_first_step_is_no_checkpoint(tmp_path: Path) -> None:
    files = played(tmp_path, lambda at, n: (at / "data").write_bytes(BYTES), every=40)
    assert kept(files, steps=STEPS, first_s=1.0, log_size=0)
    assert not kept(files, steps=STEPS, first_s=40.5, log_size=0)
    assert not kept(files, steps=(), first_s=None, log_size=0)


def test_a_file_that_is_gone_again_was_seen(tmp_path: Path) -> None:
    changes = Changes([tmp_path, tmp_path / "below"])
    for step in (10, 20):
        (tmp_path / f"it{step}").write_bytes(BYTES)
        changes.look(float(step), at_once=True)
        (tmp_path / f"it{step}").unlink()
    (one,) = kept(changes.files, steps=STEPS, first_s=1.0, log_size=0)
    assert [path.name for path in one.paths] == ["it10", "it20"]


def test_looks_are_bounded_and_show_what_changed(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").touch()
    (tmp_path / "old.pt").write_text("1")
    changes = Changes([tmp_path])
    assert list(changes.before) == [tmp_path / "old.pt"]
    changes.look(0.0)
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-5" / "weights").touch()
    (tmp_path / "run.log").touch()
    (tmp_path / "old.pt").write_text("12")
    changes.look(0.1)
    assert not changes.files
    changes.look(60.0)
    found = sorted(changes.files)
    assert [path.name for path in found] == ["old.pt", "weights", "run.log"]
    assert [path.name for path in named_checkpoints(found, tmp_path)] == ["old.pt", "weights"]


def test_the_places_that_a_command_names(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "file").touch()
    words = ["python", "t.py", "--out=../a", "dir=../b", "../c", "in/side", "--x", "../file", "/"]
    found = places([*words, "$CHAOS_SCRATCH/d", f"a{os.sep}\0"], tmp_path / "home")
    assert [path.name for path in found] == ["a", "b", "c"]
