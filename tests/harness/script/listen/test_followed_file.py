"""Lines that a command writes to a file of its own: which are read, and from where on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainchaos.harness.script.listen import progress
from trainchaos.harness.script.listen.progress import FollowedFile


@pytest.fixture(autouse=True)
def looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "FOLLOW_EVERY_S", 0.0)


def news(file: FollowedFile) -> list[str]:
    """What two looks find: one reads a file to its end, the next turns to a newer one."""
    return [line for _ in range(2) for line in file.read()]


def append(path: Path, *lines: str, at: int) -> None:
    """Add lines; ``at``: when it was changed, so that the newest file is known."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.write("".join(f"{line}\n" for line in lines))
    os.utime(path, (at, at))


def test_a_file_may_come_later_and_what_an_earlier_start_wrote_is_left_out(tmp_path: Path) -> None:
    append(tmp_path / "old.log", "step 99", at=1)
    old, new = FollowedFile(tmp_path / "old.log"), FollowedFile(tmp_path / "logs" / "new.log")
    assert (news(old), news(new)) == ([], [])
    append(tmp_path / "old.log", "step 1", at=2)
    append(tmp_path / "logs" / "new.log", "step 1", "step 2", at=2)
    assert (news(old), news(new)) == (["step 1"], ["step 1", "step 2"])
    assert (old.looks_left(), new.count) == (1, 2)
    old.close()
    new.close()


def test_of_several_the_newest_is_read_and_one_that_is_written_anew_from_its_beginning(
    tmp_path: Path,
) -> None:
    append(tmp_path / "run_1.log", "step 50", at=1)
    file = FollowedFile(tmp_path / "run_*.log")
    append(tmp_path / "run_2.log", "step 1", at=2)
    assert news(file) == ["step 1"]
    append(tmp_path / "run_2.log", "step 2", at=3)
    append(tmp_path / "run_3.log", "step 1 again", at=4)
    assert news(file) == ["step 2", "step 1 again"]
    (tmp_path / "run_3.log").write_text("new\n")
    assert news(file) == ["new"]
    file.close()
