"""Training text: found on every machine, the same every time, refused in words when it is not
there.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from trainchaos.chaos.errors import InfrastructureError, ScenarioError
from trainchaos.harness.host import corpus


def prepare(data: str | None, folder: Path, *, block: int = 16) -> tuple[bytes, str]:
    """Prepare a corpus; its bytes and description."""
    target = folder / "corpus.bin"
    size, digest, about = corpus.prepare(data, target, block=block)
    content = target.read_bytes()
    assert size == len(content)
    assert digest == hashlib.sha256(content).hexdigest()
    return content, about


def test_the_standard_library_is_there_and_always_the_same(tmp_path: Path) -> None:
    first, about = prepare(None, tmp_path)
    assert len(first) == corpus.CAP_BYTES
    assert about == f"Python standard library, {corpus.CAP_BYTES} bytes"
    assert b"def " in first
    assert prepare(None, tmp_path)[0] == first


def test_a_file_is_taken_whole(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    assert prepare(str(path), tmp_path) == (bytes(range(256)), "text, 256 bytes")


def test_a_file_is_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "CAP_BYTES", 100)
    (tmp_path / "text").write_bytes(b"x" * 1000)
    assert prepare(str(tmp_path / "text"), tmp_path)[0] == b"x" * 100


def test_a_folder_is_taken_in_sorted_order_up_to_the_cap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    (folder / "b").mkdir(parents=True)
    for name, text in (
        ("c.txt", b"4444"),
        ("a.txt", b"1111"),
        ("b/x.md", b"2222"),
        ("b.md", b"3333"),
    ):
        (folder / name).write_bytes(text)
    assert prepare(str(folder), tmp_path, block=4)[0] == b"1111222233334444"
    monkeypatch.setattr(corpus, "CAP_BYTES", 10)
    assert prepare(str(folder), tmp_path, block=4)[0] == b"1111222233"


def test_packages_and_tests_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name in (
        "site-packages/p.py",
        "test/t.py",
        "sub/__pycache__/c.pyc",
        "sub/tests/t.py",
        "sub/kept.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    assert prepare(str(folder), tmp_path, block=4)[0] == b"sub/kept.py"


def test_a_folder_below_one_called_test_is_data(tmp_path: Path) -> None:
    folder = tmp_path / "test" / "data"
    folder.mkdir(parents=True)
    (folder / "a").write_bytes(b"x" * 50)
    assert prepare(str(folder), tmp_path)[0] == b"x" * 50


@pytest.mark.parametrize("make", ["nothing", "an empty folder"])
def test_no_data_is_said_in_words(tmp_path: Path, make: str) -> None:
    path = tmp_path / "data"
    if make != "nothing":
        path.mkdir()
    with pytest.raises(ScenarioError, match=r"no data at .*data") as error:
        prepare(str(path), tmp_path)
    assert error.value.hint


@pytest.mark.parametrize(("size", "enough"), [(16, False), (17, True)])
def test_too_little_data_says_how_much_is_needed(tmp_path: Path, size: int, enough: bool) -> None:
    (tmp_path / "text").write_bytes(b"x" * size)
    if enough:
        prepare(str(tmp_path / "text"), tmp_path, block=16)
        return
    with pytest.raises(ScenarioError, match="less than one sample of 17"):
        prepare(str(tmp_path / "text"), tmp_path, block=16)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    (folder / "there").write_bytes(b"x" * 50)
    assert prepare(str(folder), tmp_path)[0] == b"x" * 50, "a dangling link is no file"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ScenarioError):
        prepare(str(tmp_path / "pipe"), tmp_path)


def test_a_disk_that_refuses_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"x" * 50)
    with pytest.raises(InfrastructureError, match="cannot write"):
        corpus.prepare(str(tmp_path / "text"), tmp_path / "nowhere" / "corpus.bin", block=4)
