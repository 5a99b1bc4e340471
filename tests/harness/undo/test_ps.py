"""``chaos ps`` of a run with thousands of processes: what it prints, and what it reads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from trainchaos.chaos.events.kinds import REQUIRED
from trainchaos.chaos.events.log import ORCHESTRATOR, EventWriter, Kind
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.run import ps
from trainchaos.harness.run.ps import MOST_LOGS, MOST_ROWS, LiveProcess, LiveRun, as_text, summaries

NODES, EACH = 2048, 8
STOPPED, SHORT = 1999, 1024


def process(number: int, *, state: str = "sleeping") -> LiveProcess:
    return LiveProcess(
        pid=number + 1,
        name=f"w{number}",
        rank=number,
        state=state,
        memory_mib=100,
        node=number // EACH,
    )


def rows() -> list[LiveProcess]:
    """Ranks of NODES nodes: a rank of STOPPED is stopped, SHORT lacks one."""
    found = [
        process(number, state="stopped" if number == STOPPED * EACH else "sleeping")
        for number in range(NODES * EACH)
        if number != SHORT * EACH
    ]
    random.Random(1).shuffle(found)
    return found


def run(processes: list[LiveProcess], folder: Path) -> LiveRun:
    return LiveRun(
        run=folder,
        scenario="large",
        state="live",
        pid=1,
        since="2026-01-01T00:00:00+00:00",
        arm="arm",
        step=7,
        processes=tuple(processes),
        to_undo=(),
    )


def test_a_large_run_is_shown_by_node_and_what_is_unusual_first(tmp_path: Path) -> None:
    said = as_text([run(rows(), tmp_path)], tmp_path)
    lines = said.splitlines()
    assert len(lines) <= MOST_ROWS + 6 and len(said) < 10_000
    assert "16383 processes with 16383 ranks on 2048 nodes" in said
    assert lines[4].split()[:2] == [str(STOPPED), "8"] and lines[4].endswith("1 stopped")
    assert lines[5].split()[:2] == [str(SHORT), "7"]
    assert [line.split()[0] for line in lines[6:9]] == ["0", "1", "2"]
    assert f"and {NODES - MOST_ROWS} nodes more, 0 of them" in lines[-1]


def test_a_small_run_is_shown_process_by_process(tmp_path: Path) -> None:
    few = [process(number) for number in range(MOST_ROWS)]
    lines = as_text([run(few, tmp_path)], tmp_path).splitlines()
    assert len(lines) == 3 + MOST_ROWS and lines[-1].endswith("w63 on node 7")


def test_each_process_counts_once() -> None:
    loose = LiveProcess(pid=9, name="store", rank=None, state="sleeping", memory_mib=1, node=None)
    found = summaries([*rows(), loose])
    assert sum(one.processes for one in found) == NODES * EACH
    assert len({one.node for one in found}) == NODES + 1
    assert summaries([]) == []


def test_few_logs_are_read_however_many_ranks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RunDirectory(tmp_path)
    made.make_arm("arm")
    ours = EventWriter(made.events("arm"), ORCHESTRATOR, lambda: 1)
    for number in range(3 * MOST_LOGS):
        ours.write(
            Kind.PROCESS_SPAWNED,
            process=f"w{number}",
            pid=number + 1,
            role="worker",
            mode="warm",
            node=number // EACH,
        )
        log = EventWriter(made.events("arm"), f"w{number}", lambda: 1)
        log.write(Kind.STEP_COMMITTED, step=5, **dict.fromkeys(REQUIRED[Kind.STEP_COMMITTED]))
        log.close()
    ours.close()
    opened: list[Path] = []
    whole = ps.open_regular

    def counted(path: Path) -> object:
        opened.append(path)
        return whole(path)

    monkeypatch.setattr(ps, "open_regular", counted)
    names, members, step, nodes = ps._progress(made, "arm")
    assert (len(names), members, step) == (3 * MOST_LOGS, [], 5)
    assert nodes["w95"] == 95 // EACH
    assert len(opened) == MOST_LOGS + 1
