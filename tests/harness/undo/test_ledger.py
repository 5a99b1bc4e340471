"""The undo ledger: on the disk before the act, readable after any kill, and silent about nothing
that is open.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.undo.base import Undo
from trainchaos.harness.undo.ledger import Ledger, read_open
from trainchaos.harness.undo.records import (
    FreeShm,
    KillMarked,
    KillProcess,
    KillSession,
    RemoveCgroup,
    RemoveQdisc,
    RemoveTree,
    Unmount,
)

HERE = Path("/somewhere")
RECORDS: list[Undo] = [
    KillProcess(pid=2, start_time=1, name="w0"),
    KillSession(sid=2, start_time=1, marker="m"),
    KillMarked(marker="12345678", since=3),
    Unmount(path=HERE, source="chaos"),
    RemoveCgroup(path=HERE),
    RemoveTree(path=HERE, inside=HERE),
    RemoveQdisc(device="eth0", handle="1:"),
    FreeShm(run=HERE, since_ns=4),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_open_until_it_is_undone(tmp_path: Path, record: Undo) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    name = ledger.will(record, arm="a", fault="f")
    (entry,) = read_open(tmp_path / "ledger.jsonl")
    assert (entry.id, entry.undo, dict(entry.about)) == (name, record, {"arm": "a", "fault": "f"})
    ledger.failed(name, "busy")
    assert [entry.problem for entry in read_open(tmp_path / "ledger.jsonl")] == ["busy"]
    ledger.undone(name, "gone")
    assert read_open(tmp_path / "ledger.jsonl") == []


def test_records_of_several_writers_stay_in_order(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    names = [Ledger(path).will(record) for record in RECORDS]
    Ledger(path).write(fault="f", note="nothing to undo")
    Ledger(path).undone(names[3], "gone")
    assert [entry.id for entry in read_open(path)] == names[:3] + names[4:]


@pytest.mark.parametrize("kept", [1, 20, -2])
def test_a_torn_line_loses_only_itself(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    first = ledger.will(RECORDS[0])
    whole = path.stat().st_size
    ledger.will(RECORDS[1])
    os.truncate(path, whole + kept if kept > 0 else path.stat().st_size + kept)
    assert [entry.id for entry in read_open(path)] == [first]
    last = ledger.will(RECORDS[2])  # a healer writes after the tear
    ledger.undone(first, "gone")
    assert [entry.id for entry in read_open(path)] == [last]


def test_a_full_disk_forbids_the_act_but_not_the_healing() -> None:
    ledger = Ledger(Path("/dev/full"))
    with pytest.raises(InfrastructureError, match="No space left"):
        ledger.will(RECORDS[0])
    ledger.undone("x", "gone")
    ledger.failed("x", "busy")


def test_only_what_outlives_the_machine_is_forced_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", forced.append)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for record in RECORDS:
        before = len(forced)
        ledger.will(record)
        assert len(forced) - before == isinstance(record, RemoveTree)


@pytest.mark.parametrize(
    "undo", [{"do": "later-invention"}, "kill", None, {"do": "kill-process", "pid": 1}]
)
def test_a_record_that_cannot_be_read_is_open_all_the_same(tmp_path: Path, undo: Any) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(json.dumps({"will": "abc", "undo": undo}) + "\n")
    (entry,) = read_open(path)
    assert entry.undo is None


def test_no_ledger_holds_nothing(tmp_path: Path) -> None:
    assert read_open(tmp_path / "ledger.jsonl") == []
    (tmp_path / "ledger.jsonl").write_bytes(b'\xff\xfe\n[1]\n7\n{"undone": "never"}\n')
    assert read_open(tmp_path / "ledger.jsonl") == []
