"""What is said of an arm while it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.run.progress import describe, tell_judging


@pytest.mark.parametrize(
    ("target", "whom"),
    [
        ({"links": [[0, 1], [0, 2]], "processes": {"0": "w0"}}, "links 0→1, 0→2"),
        ({"links": [[1, 0]]}, "link 1→0"),
        ({"store": "the job's"}, "the job's store"),
        ({"node": 1}, "node 1"),
        ({"process": "w2", "rank": 2}, "rank 2 (w2)"),
        ({"process": "s0", "rank": None}, "spare s0"),
    ],
)
def test_whom_a_fault_hits(target: dict[str, Any], whom: str) -> None:
    data = {"fault": "f", "kind": "partition", "occurrence": 0, "target": target}
    event = Event(
        seq=1,
        actor=ORCHESTRATOR,
        kind=Kind.FAULT_INJECTED,
        time_ns=1,
        generation=1,
        step=20,
        data=data,
    )
    assert describe(event) == f"✗ partition hits {whom} in step 20"


@pytest.mark.parametrize(
    ("fit", "said", "line"),
    [
        (True, "", "↻ cpu:2 of node 0 is fit"),
        (False, "a word differs", "↻ cpu:2 of node 0 is unfit: a word differs"),
        (None, "no answer", "↻ cpu:2 of node 0 is not known to be fit: no answer"),
    ],
)
def test_what_a_check_of_a_place_found(fit: bool | None, said: str, line: str) -> None:
    data = {"node": 0, "device": "cpu:2", "why": "", "fit": fit, "said": said, "seconds": 3.0}
    event = Event(
        seq=1,
        actor=ORCHESTRATOR,
        kind=Kind.PLACE_CHECKED,
        time_ns=1,
        generation=1,
        step=None,
        data=data,
    )
    assert describe(event) == line


def test_a_keeper_that_ends_by_itself_is_said() -> None:
    data = {
        "process": "k0",
        "pid": 9,
        "exit_code": None,
        "signal": 9,
        "expected": False,
        "last_seq": None,
    }
    exited = {
        "seq": 1,
        "actor": ORCHESTRATOR,
        "kind": Kind.PROCESS_EXITED,
        "time_ns": 1,
        "generation": 1,
        "step": None,
    }
    assert describe(Event(**exited, data={**data, "role": "keeper"})) == (
        "! k0 ended, and what it kept in memory is gone: signal 9"
    )
    assert describe(Event(**exited, data={**data, "role": "keeper", "expected": True})) is None
    assert describe(Event(**exited, data=data)) is None, (
        "what a rank's end means is said by the failure"
    )


def test_that_large_logs_are_judged_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(root=tmp_path)
    log = run.events("arm") / "rank.jsonl"
    log.parent.mkdir(parents=True)
    for size, said in ((1 << 20, ""), (40 << 20, "judging 40 MiB of logs ...\n")):
        with log.open("wb") as stream:
            stream.truncate(size)
        tell_judging(run)
        assert capsys.readouterr().err == said
