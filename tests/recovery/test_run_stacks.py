"""A script's rank that hangs leaves its stacks, and those of a peer, before it is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.running import stand_in, supervised
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.process.outside_stacks import PROGRAM

SCRIPT = """
import pathlib, sys, threading
import torch
from trainchaos import recovery
once = pathlib.Path(sys.argv[1])
job = recovery.join(samples=64, steps=60, global_batch=4)
model = torch.nn.Linear(2, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.0))

def waits_for_ever():
    threading.Lock().acquire()
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

while job.running():
    with job.step() as step:
        if job.rank == 1 and step.number == 30 and not once.exists():
            once.touch()
            waits_for_ever()
        step.backward(model(torch.ones(len(step.samples), 2)).sum())
        step.commit()
"""


@pytest.mark.real
def test_a_rank_that_hangs_leaves_its_stacks(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    options = ("--ranks", "2", "--spares", "1", "--logs", str(logs))
    arguments = (str(tmp_path / "once"),)
    found = supervised(tmp_path / "job", SCRIPT, *options, arguments=arguments)
    events = found["orchestrator"]
    (failure,) = [e for e in events if e.kind is Kind.FAILURE_DETECTED]
    assert failure.data["cause"] == "hang"
    dumped = {e.data["role"]: e for e in events if e.kind is Kind.STACKS_DUMPED}
    hung, peer = dumped["hung"], dumped["peer"]
    assert hung.data["process"] == failure.data["process"]
    assert hung.data["frames"][0].endswith("in waits_for_ever")
    assert any("recovery/collectives" in frame for frame in peer.data["frames"]), peer.data
    assert "in waits_for_ever" in (logs / hung.data["file"]).read_text()
    assert (logs / peer.data["file"]).is_file()
    assert _of(events, Kind.PROCESS_EXITED, hung.data["process"]).time_ns > failure.time_ns
    stood = {e.data["role"]: e.data for e in events if e.kind is Kind.COLLECTIVES_DUMPED}
    assert {e.data["process"] for e in dumped.values()} == {d["process"] for d in stood.values()}
    assert stood["hung"]["rank"] == 1 and stood["peer"]["rank"] == 0, stood
    assert [e["state"] for e in stood["hung"]["entries"]] == ["done"]
    last, *begun = stood["peer"]["entries"]
    assert last["state"] == "done" and begun and begun[0]["state"] != "done"
    assert begun[0]["seq"] == stood["hung"]["entries"][0]["seq"] + 1, "what the hung one lacks"
    kept = {path.name for path in logs.glob("*.stacks")}
    assert kept == {hung.data["file"], peer.data["file"]}, "of those that were asked only"


def _of(events: list[Event], kind: Kind, process: str) -> Event:
    """The event of that kind about a process."""
    return next(e for e in events if e.kind is kind and e.data["process"] == process)


STAND_IN = """
import json, sys
pid = int(sys.argv[sys.argv.index("--pid") + 1])
frame = {"name": "from_outside", "filename": "train.py", "line": 7}
print(json.dumps([{"os_thread_id": pid, "frames": [frame]}]))
"""
STOPS = SCRIPT.replace(
    "            waits_for_ever()",
    "            import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
)


@pytest.mark.long
@pytest.mark.real
def test_a_rank_that_is_stopped_is_read_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for py-spy, before it is killed; the spare has taken over by then."""
    stand_in(tmp_path / PROGRAM, STAND_IN)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = ("--ranks", "2", "--spares", "1", "--logs", str(tmp_path / "logs"))
    arguments = (str(tmp_path / "once"),)
    events = supervised(tmp_path / "job", STOPS, *options, arguments=arguments)["orchestrator"]
    (failure,) = [e for e in events if e.kind is Kind.FAILURE_DETECTED]
    assert failure.data["cause"] == "hang" and failure.data["stopped"] is True
    hung = next(e for e in events if e.kind is Kind.STACKS_DUMPED and e.data["role"] == "hung")
    assert hung.data["process"] == failure.data["process"]
    assert hung.data["answered"] is True
    assert hung.data["frames"] == ["train.py:7 in from_outside"]
    exited = _of(events, Kind.PROCESS_EXITED, hung.data["process"])
    assert exited.data["signal"] == 9 and exited.data["expected"] is True
