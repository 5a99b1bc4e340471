"""Ranks that share their processors with whatever else runs there: slow, and healthy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_scenarios import loaded, simulate

from chaos.events import Kind, read_log

pytestmark = [pytest.mark.real, pytest.mark.soak]
HOGS = 4
SCENARIO = """\
version: 1
name: busy-machine
description: Nothing happens to the job but that it gets little of the processors.
seed: 1
workload: {kind: gpt, size: nano, ranks: 4, steps: 800, global_batch: 16, checkpoint: {every: 100, keep: 2}}
recovery: hot-spare
baseline: none
stop_conditions: [{when: "wall_time > 240s"}]
"""


@pytest.fixture(params=[0, 19], ids=["as-urgent", "niced"])
def hogs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Processes that take all the time they get. Each ends with this one, and after a while by itself."""
    burn = (
        "import os, sys, time\n"
        "os.nice(int(sys.argv[1]))\n"
        "end = time.monotonic() + 600\n"
        "while time.monotonic() < end and os.getppid() == int(sys.argv[2]): sum(range(100000))\n"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", burn, str(request.param), str(os.getpid())])
        for _ in range(HOGS)
    ]
    try:
        yield
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.wait(timeout=30)


@pytest.mark.usefixtures("hogs")
def test_nobody_is_taken_for_hung_on_a_busy_machine(tmp_path: Path) -> None:
    path = tmp_path / "busy-machine.yaml"
    path.write_text(SCENARIO)
    simulate(loaded(path), tmp_path)
    found = [
        event for events in tmp_path.rglob("events/*") if events.is_dir()
        for event in read_log(events).events if event.kind is Kind.FAILURE_DETECTED
    ]  # fmt: skip
    logs = [events for events in tmp_path.rglob("events/*") if events.is_dir()]
    assert logs and any(
        e.kind is Kind.STEP_COMMITTED and (e.step or 0) > 20 for e in read_log(logs[0]).events
    )
    assert found == []
