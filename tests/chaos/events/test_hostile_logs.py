"""Logs that nobody of ours wrote: too large, torn, out of order, of another version, of other
types.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.search.simulate import KILL, cell_of, play
from trainchaos.chaos.errors import InfrastructureError, LogError
from trainchaos.chaos.events import log as module
from trainchaos.chaos.events.log import (
    MAX_LINE_BYTES,
    ActorLog,
    Event,
    EventWriter,
    Kind,
    read_actor,
    read_log,
)
from trainchaos.recovery.cli.takeover_log import read_takeover_log

LINE = {
    "kind": "error_raised",
    "actor": "w0",
    "seq": 0,
    "time_ns": 5,
    "generation": 1,
    "step": None,
    "data": {"type": "t", "message": "m"},
}


def written(folder: Path, *lines: str | bytes, actor: str = "w0") -> ActorLog:
    path = folder / f"{actor}.jsonl"
    path.write_bytes(
        b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines)
    )
    return read_actor(path)


def read_so_far() -> int:
    """Bytes that this process has read."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_log_of_ten_gigabytes_is_not_read_and_proves_nothing(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path, "orchestrator", time.monotonic_ns)
    writer.write(Kind.ERROR_RAISED, type="t", message="m")
    writer.close()
    path = tmp_path / "w0.jsonl"
    with open(path, "wb") as stream:
        stream.write(json.dumps(LINE).encode() + b"\n")
        stream.truncate(10_000_000_000)
    before = read_so_far()
    log = read_log(tmp_path)
    assert read_so_far() - before < 1 << 20
    assert log.actors["w0"].unread and log.actors["w0"].events == () and not log.actors["w0"].ended
    assert any(
        "10000 MB, more than the 537 MB that are read" in problem for problem in log.problems
    )


def test_nobody_takes_over_by_a_log_that_was_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LOG_BYTES", 10)
    written(tmp_path, json.dumps(LINE), actor="orchestrator")
    with pytest.raises(InfrastructureError, match="cannot be read"):
        read_takeover_log(tmp_path)


def test_a_line_without_an_end_is_read_up_to_a_bound(tmp_path: Path) -> None:
    found = written(
        tmp_path, json.dumps(LINE), b"x" * (MAX_LINE_BYTES + 5), b"\n", json.dumps(LINE)
    )
    assert len(found.events) == 1
    assert any("a line of more than" in problem for problem in found.problems)


@pytest.mark.parametrize(
    "change",
    [
        {"seq": "0"},
        {"seq": None},
        {"seq": 0.5},
        {"seq": True},
        {"time_ns": 10**300},
        {"time_ns": "5"},
        {"time_ns": [5]},
        {"generation": {}},
        {"step": "1"},
        {"step": 2**63},
        {"actor": ["w0"]},
        {"actor": None},
        {"data": []},
        {"data": "x"},
        {"data": None},
        {"kind": "of_version_9"},
        {"kind": ["x"]},
        {"kind": None},
    ],
    ids=str,
)
def test_what_no_writer_writes_is_no_event(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(LogError, match="not an event"):
        Event.from_line(json.dumps(LINE | change))
    found = written(
        tmp_path, json.dumps(LINE), json.dumps(LINE | change), json.dumps(LINE | {"seq": 1})
    )
    assert [event.seq for event in found.events] == [0, 1] and len(found.problems) == 1


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"kind":' * 50_000,
        "9" * 10_000,
        "null",
        "[]",
        "1",
        "\x00",
        "\ud7ff",
        "}{",
        "",
    ],
)
def test_a_line_that_is_no_event_is_a_problem_of_a_few_words(tmp_path: Path, line: str) -> None:
    found = written(tmp_path, json.dumps(LINE), line)
    assert len(found.events) == 1
    (problem,) = found.problems
    assert len(problem) < 600


# ---- whole runs


def damaged(folder: Path, change: Callable[[random.Random, list[str]], list[str]]) -> None:
    rng = random.Random(1)
    for path in sorted(folder.glob("*.jsonl")):
        path.write_text("".join(f"{line}\n" for line in change(rng, path.read_text().splitlines())))


def shuffled(rng: random.Random, lines: list[str]) -> list[str]:
    return rng.sample(lines, len(lines))


def halved(rng: random.Random, lines: list[str]) -> list[str]:
    return [*lines[: len(lines) // 2], lines[len(lines) // 2][:-7]]


def doubled(rng: random.Random, lines: list[str]) -> list[str]:
    return [*lines, *lines]


def newer(rng: random.Random, lines: list[str]) -> list[str]:
    return [
        line.replace('"kind":"', '"kind":"v9_') if rng.random() < 0.3 else line for line in lines
    ]


@pytest.mark.parametrize("change", [shuffled, halved, doubled, newer])
def test_a_damaged_log_is_read_with_problems_and_never_an_exception(
    change: Callable[[random.Random, list[str]], list[str]], memory: Path
) -> None:
    play(cell_of("hot-spare", [KILL]), memory, seed=1)
    (folder,) = {path.parent for path in memory.rglob("orchestrator.jsonl")}
    damaged(folder, change)
    assert read_log(folder).problems
