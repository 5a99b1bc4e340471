"""Where the processes of a job start: not at places of a bad reputation while there are others."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainchaos.chaos.events.log import ORCHESTRATOR, EventWriter, Kind
from trainchaos.recovery.cli.avoided_places import AvoidedPlaces
from trainchaos.recovery.cli.roster import ScriptRoster
from trainchaos.recovery.cli.takeover_log import TakeoverLog, read_takeover_log
from trainchaos.recovery.health.taints import made, of_place
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.process.host import Exited

BAD, GOOD = (0, "cuda:1"), (0, "cuda:0")
NOW = datetime.now(UTC)


def roster_of(
    devices: int,
    log: TakeoverLog | None = None,
    *,
    now_s: float = 0.0,
    tainted: AvoidedPlaces = AvoidedPlaces(()),
) -> ScriptRoster:
    """The roster of a job on one node with so many GPUs."""
    host: Any = SimpleNamespace(
        now_ns=lambda: int(now_s * 1e9),
        usable=lambda: [0],
        places_on=lambda node: [f"cuda:{index}" for index in range(devices)],
        spawn=lambda name, role, mode, device, node: 7,
        may_return=lambda: False,
    )
    room: Any = SimpleNamespace(begins=lambda name: None)
    return ScriptRoster(host, room, log, tainted, lambda *_, **__: None, lambda: False)


def started(roster: ScriptRoster, count: int = 1) -> list[str]:
    return [roster.start("worker", "warm").device for _ in range(count)]


def ends(roster: ScriptRoster, name: str) -> None:
    roster.exited(Exited(process=name, exit_code=1, signal=None, time_ns=0))
    roster.forget(name)


def test_a_process_starts_on_a_suspect_spot_only_where_there_is_no_other() -> None:
    roster = roster_of(2)
    roster.reputation.doubt(GOOD)
    assert started(roster, 2) == ["cuda:1", "cuda:0"], "the job does not wait for a check"
    ends(roster, "w0")
    roster.reputation.doubt(BAD)
    assert roster.spots_in_use() == {GOOD}
    for spot in (GOOD, BAD):
        roster.reputation.trust(spot, fit=True)
    assert started(roster) == ["cuda:1"]


def test_a_process_does_not_start_at_a_tainted_device_while_there_are_others() -> None:
    taint = made({**of_place("a/cuda:0"), "reason": "XID 79", "since": NOW, "by": "alarm"})
    tainted = AvoidedPlaces([taint])
    tainted.hosts_are({0: "a"})
    assert started(roster_of(2, tainted=tainted), 2) == ["cuda:1"] * 2


def test_a_process_does_not_start_where_another_gave_wrong_values() -> None:
    roster = roster_of(3)
    assert started(roster, 2) == ["cuda:0", "cuda:1"]
    roster.distrust("w0")
    roster.distrust("nobody")
    ends(roster, "w0")
    assert started(roster) == ["cuda:2"], "it is known after the process is forgotten"
    assert started(roster) == ["cuda:0"], "there is no other that is free"


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
    log = read_takeover_log(tmp_path)
    assert isinstance(log, TakeoverLog)
    assert started(roster_of(2, log, now_s=25.0)) == ["cuda:1" if avoided else "cuda:0"]
