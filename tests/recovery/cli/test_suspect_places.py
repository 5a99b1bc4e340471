"""Where the processes of a job start: not at places of a bad reputation while there are others."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainchaos.chaos.events.log import ORCHESTRATOR, EventWriter, Kind
from trainchaos.recovery.cli.process_host import ProcessPlacement
from trainchaos.recovery.cli.processes import JobProcesses
from trainchaos.recovery.cli.takeover_log import TakeoverLog, read_takeover_log
from trainchaos.recovery.nodes.link.clock import boot_id

BAD, GOOD = (0, "cuda:1"), (0, "cuda:0")


def processes_on(
    spots: list[ProcessPlacement], log: TakeoverLog | None = None, *, now_s: float = 0.0
) -> JobProcesses:
    """The processes of a job that has these places."""
    host: Any = SimpleNamespace(
        spots=lambda: spots, start=lambda name, spot, config, mode: 7, may_return=lambda: False
    )
    room: Any = SimpleNamespace(begins=lambda name: None)
    return JobProcesses(host, room, log, lambda: now_s, lambda *_, **__: None)


def test_a_process_starts_on_a_suspect_spot_only_where_there_is_no_other(tmp_path: Path) -> None:
    spots = [
        ProcessPlacement(node=0, device=device, address="", events=tmp_path, logs=None)
        for device in ("cuda:0", "cuda:1")
    ]
    processes = processes_on(spots)
    processes.reputation.doubt(GOOD)

    def start() -> str:
        config: Any = None
        started = processes.start(
            "worker", "warm", lambda name, spot: config, stopped=lambda: False
        )
        return started.spot.device

    assert [start(), start()] == ["cuda:1", "cuda:0"], "the job does not wait for a check"
    processes.exited("w0")
    processes.forget("w0")
    processes.reputation.doubt(BAD)
    assert processes.spots_in_use() == {GOOD}
    for spot in (GOOD, BAD):
        processes.reputation.trust(spot, fit=True)
    assert start() == "cuda:1"


def test_a_process_does_not_start_where_another_gave_wrong_values(tmp_path: Path) -> None:
    spots = [
        ProcessPlacement(node=0, device=f"cuda:{index}", address="", events=tmp_path, logs=None)
        for index in range(3)
    ]
    processes = processes_on(spots)

    def start() -> str:
        config: Any = None
        return processes.start(
            "worker", "warm", lambda name, spot: config, stopped=lambda: False
        ).spot.device

    assert [start(), start()] == ["cuda:0", "cuda:1"]
    processes.distrust("w0")
    processes.distrust("nobody")
    processes.exited("w0")
    processes.forget("w0")
    assert start() == "cuda:2", "it is known after the process is forgotten"
    assert start() == "cuda:0", "there is no other that is free"


@pytest.mark.parametrize(
    ("cause", "times", "avoided"),
    [("exit", 3, True), ("exit", 2, False), ("notice", 3, False), ("diverged", 1, True)],
)
def test_whoever_takes_over_knows_where_processes_failed(
    tmp_path: Path, cause: str, times: int, avoided: bool
) -> None:
    seconds = itertools.count(0, 2)
    writer = EventWriter(tmp_path, ORCHESTRATOR, lambda: next(seconds) * 10**9)
    writer.write(Kind.ACTOR_STARTED, pid=1, host="here", wall_ns=1, boot=boot_id())
    spawned = {"pid": 7, "role": "worker", "mode": "warm", "node": 0, "device": "cuda:0"}
    failed = {"failure": 1, "rank": 0, "cause": cause, "detail": ""}
    for number in range(times):
        writer.write(Kind.PROCESS_SPAWNED, process=f"w{number}", **spawned)
        gone = {"pid": 7, "exit_code": 1, "signal": None, "expected": False, "last_seq": 0}
        writer.write(Kind.PROCESS_EXITED, process=f"w{number}", **gone)
        writer.write(Kind.FAILURE_DETECTED, step=1, process=f"w{number}", **failed)
    began = {"members": ["w9"], "state": "peer", "source": None, "cause": "failure"}
    writer.write(Kind.GENERATION_STARTED, **began)
    writer.close()
    spots = [
        ProcessPlacement(node=0, device=device, address="", events=tmp_path, logs=None)
        for device in ("cuda:0", "cuda:1")
    ]
    log = read_takeover_log(tmp_path)
    assert isinstance(log, TakeoverLog)
    processes = processes_on(spots, log, now_s=25.0)
    config: Any = None
    started = processes.start("worker", "warm", lambda *_: config, stopped=lambda: False)
    assert started.spot.device == ("cuda:1" if avoided else "cuda:0")
