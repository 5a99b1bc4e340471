"""The list of tainted places: what is read, what is refused where, and several writers at once."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError, NewerVersion
from trainchaos.recovery.health import taints as module
from trainchaos.recovery.health.taints import (
    Taint,
    TaintError,
    TaintList,
    made,
    of_place,
    taints_path,
)

NOW = datetime(2026, 11, 26, 9, 0, tzinfo=UTC)
ONE = """# kept by hand
version: 1
taints:
  - node: host-a  # the fan
    reason: loud
    since: 2026-11-01T00:00:00Z
    by: person
"""


def taint(place: str = "host-a", **more: Any) -> Taint:
    return made({**of_place(place), "reason": "XID 79", "since": NOW, "by": "person", **more})


def listed(tmp_path: Path, text: str) -> TaintList:
    path = tmp_path / "taints.yaml"
    path.write_text(text)
    return TaintList(path)


def test_what_is_added_is_read_again(tmp_path: Path) -> None:
    known = TaintList(tmp_path / "new" / "taints.yaml")
    assert known.read() == () and not known.path.exists()
    both = (
        taint("host-a/cuda:3", evidence={"xid": 79, "count": 2}, expiry=NOW + timedelta(days=1)),
        taint("7", evidence="a text: with a colon", by="preflight"),
    )
    assert [known.add(each, NOW) for each in both] == [True, True]
    assert known.read() == both
    assert known.path.read_text().startswith("version: 1\n")
    assert not known.add(both[0], NOW + timedelta(hours=1)) and known.read() == both


def test_an_expired_taint_does_not_hold_and_is_kept(tmp_path: Path) -> None:
    known = TaintList(tmp_path / "taints.yaml")
    short = taint(expiry=NOW + timedelta(hours=1))
    known.add(short, NOW)
    assert known.active(NOW + timedelta(minutes=59)) == (short,)
    assert known.active(NOW + timedelta(hours=1)) == ()
    assert known.read() == (short,)
    assert known.add(taint(since=NOW), NOW + timedelta(hours=2)) and len(known.read()) == 2
    with pytest.raises(TaintError, match="would have expired"):
        known.add(taint(reason="other", expiry=NOW + timedelta(hours=1)), NOW + timedelta(hours=1))


def test_clearing_removes_all_of_a_place_and_nothing_else(tmp_path: Path) -> None:
    known = TaintList(tmp_path / "taints.yaml")
    assert known.clear("host-a") == ()
    for each in (taint(), taint("host-b"), taint(reason="again"), taint("host-a/cuda:0")):
        known.add(each, NOW)
    assert [each.reason for each in known.clear("host-a")] == ["XID 79", "again"]
    assert [each.place for each in known.read()] == ["host-b", "host-a/cuda:0"]


def test_comments_of_a_person_stay_and_json_stays_json(tmp_path: Path) -> None:
    known = listed(tmp_path, ONE)
    known.add(taint("host-b"), NOW)
    assert known.path.read_text().startswith("# kept by hand\n")
    assert "# the fan" in known.path.read_text()
    assert [each.place for each in known.read()] == ["host-a", "host-b"]
    fields = {"node": "a", "reason": "b", "since": "2026-01-01T00:00:00Z", "by": "alarm"}
    known = listed(tmp_path, json.dumps({"version": 1, "taints": [fields]}))
    known.add(taint("host-b"), NOW)
    assert [each["node"] for each in json.loads(known.path.read_text())["taints"]] == [
        "a",
        "host-b",
    ]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (ONE.replace("by: person", "by: nobody"), 7, "taint 1: by:"),
        (ONE.replace("reason:", "raeson:"), 5, "taint 1: raeson: Extra inputs"),
        (ONE.replace("    reason: loud\n", ""), 4, "taint 1: reason: Field required"),
        (ONE.replace("node: host-a", "device: host-a"), 4, "no device of a node"),
        (ONE.replace("node: host-a", "node: 'a b'"), 4, "no name of a node"),
        (ONE.replace("    by:", "    device: a/cuda:0\n    by:"), 4, "either a node or a device"),
        (ONE.replace("T00:00:00Z", "T00:00:00"), 6, "no time zone"),
        (ONE.replace("2026-11-01T00:00:00Z", "1767225600"), 6, "no time"),
        (ONE + "    expiry: 2026-01-01T00:00:00Z\n", 4, "is not after"),
        (ONE + "    by: person\n", 8, 'duplicate key "by"'),
        (ONE + "    evidence: [1]\n", 8, "taint 1: evidence:"),
        (ONE + "more: 1\n", 8, "more: Extra inputs"),
        (ONE.replace("version: 1", "version: one"), 2, "version: has to be"),
        (ONE.replace("version: 1\n", ""), 2, "version: has to be"),
        ("version: 1\ntaints: 3\n", 2, "taints: Input should be a valid list"),
        ("version: 1\ntaints: [3]\n", 2, "taint 1: Input should be a valid dictionary"),
        ("version: 1\ntaints: [", 2, "not valid YAML"),
        ("- 1\n", 1, "the list is a mapping"),
        ("version: 1\ntaints: " + "[" * 1000, 1, "not valid YAML"),
    ],
)
def test_a_malformed_file_is_refused_by_line_and_left_alone(
    tmp_path: Path, text: str, line: int, said: str
) -> None:
    known = listed(tmp_path, text)
    for act in (known.read, lambda: known.add(taint("host-b"), NOW), lambda: known.clear("host-a")):
        with pytest.raises(TaintError) as caught:
            act()
        assert caught.value.exit_code == EXIT_USAGE
        assert caught.value.message.startswith(f"{known.path}:{line}") or not said
        assert said in caught.value.message
    assert known.path.read_text() == text


@pytest.mark.parametrize("raw", [b"version: 1\n\xff", b"version: 1\n#" + b"x" * 1_000_001])
def test_bytes_that_are_no_list_are_refused(tmp_path: Path, raw: bytes) -> None:
    known = TaintList(tmp_path / "taints.yaml")
    known.path.write_bytes(raw)
    with pytest.raises(TaintError):
        known.add(taint(), NOW)
    assert known.path.read_bytes() == raw


def test_a_newer_version_and_a_pipe_are_refused_by_name(tmp_path: Path) -> None:
    known = listed(tmp_path, "version: 2\ntaints: {anything: at all}\n")
    for act in (known.read, lambda: known.add(taint(), NOW)):
        with pytest.raises(NewerVersion, match=r"newer version \(2; this one reads up to 1\)"):
            act()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaintError, match="is not a regular file"):
        TaintList(tmp_path / "pipe").read()


def test_a_file_that_was_named_has_to_exist(tmp_path: Path) -> None:
    with pytest.raises(TaintError, match="no such list"):
        TaintList(tmp_path / "typo.yaml", needed=True).read()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    known = listed(tmp_path, ONE)
    (tmp_path / "link").symlink_to(known.path)
    TaintList(tmp_path / "link").add(taint("host-b"), NOW)
    assert (tmp_path / "link").is_symlink() and len(known.read()) == 2


ADDER = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from trainchaos.recovery.health.taints import made
from trainchaos.recovery.health.taints import TaintList
now = datetime(2026, 11, 26, tzinfo=UTC)
sys.stdin.readline()
for number in range(15):
    each = made({"node": f"{sys.argv[2]}-{number}", "reason": "r", "since": now, "by": "alarm"})
    TaintList(Path(sys.argv[1])).add(each, now)
"""


@pytest.mark.long
def test_several_writers_lose_nothing_and_no_reader_sees_half(tmp_path: Path) -> None:
    known = TaintList(tmp_path / "taints.yaml")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", ADDER, str(known.path), name], stdin=subprocess.PIPE, text=True
        )
        for name in ("a", "b", "c")
    ]
    for each in writers:
        assert each.stdin is not None
        each.stdin.write("go\n")
        each.stdin.flush()
    most = 0
    while any(each.poll() is None for each in writers):
        now = len(known.read())  # raises if it sees half a file
        assert now >= most
        most = now
    assert [each.wait(timeout=60) for each in writers] == [0, 0, 0]
    expected = {f"{name}-{number}" for name in "abc" for number in range(15)}
    assert {each.place for each in known.read()} == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taints.yaml", "taints.yaml.lock"]


def test_a_lock_that_is_held_for_ever_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOCK_LIMIT_S", 0.05)
    known = listed(tmp_path, ONE)
    with open(tmp_path / "taints.yaml.lock", "w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(TaintError, match="locked by another process"):
            known.add(taint("host-b"), NOW)
    assert known.path.read_text() == ONE


def test_a_write_that_fails_leaves_the_old_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = listed(tmp_path, ONE)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TaintError, match="cannot be written: No space left"):
        known.add(taint("host-b"), NOW)
    assert known.path.read_text() == ONE
    assert not list(tmp_path.glob(".taints*"))


@pytest.mark.parametrize(
    "place", ["", "a/", "/cuda:0", "a/gpu:0", "a/cuda:01", "a b", "a/cuda:0/1"]
)
def test_a_malformed_place_is_refused(place: str) -> None:
    with pytest.raises(ChaosError, match="is no place"):
        of_place(place)


@pytest.mark.parametrize("reason", ["", "two\nlines", "\x1b[31mred", "x" * 2001])
def test_a_reason_is_one_printable_line(reason: str) -> None:
    with pytest.raises(TaintError, match="reason"):
        taint(reason=reason)


@pytest.mark.parametrize(
    ("env", "path"),
    [
        ({"CHAOS_TAINTS": "/x/y.yaml", "XDG_STATE_HOME": "/s"}, "/x/y.yaml"),
        ({"CHAOS_TAINTS": "", "XDG_STATE_HOME": "/s"}, "/s/trainchaos/taints.yaml"),
        ({"XDG_STATE_HOME": "relative"}, "~/.local/state/trainchaos/taints.yaml"),
        ({}, "~/.local/state/trainchaos/taints.yaml"),
    ],
)
def test_where_the_list_is(env: dict[str, str], path: str) -> None:
    assert taints_path(None, env) == Path(path).expanduser()
    assert taints_path(Path("given"), env) == Path("given")
