"""Real commands behind shells and pipes: who is hit is who trains, and everything that is said is
heard.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness.script.test_script import events, run, write
from tests.support.running import PYTHON
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.checkers.job import observed
from trainchaos.harness.launch.storage import lacks_mount
from trainchaos.harness.script.listen import outputlog

pytestmark = pytest.mark.real

STEPS = """import os, sys, time
for step in range(1, 31):
    time.sleep(float(os.environ.get("LATE_S", "0.05")) if step > 12 else 0.05)
    if os.environ.get("RANK", "0") == "0":
        print("step", step, "loss 1.0", flush=True)
"""
FLOOD = """import glob, os, time
os.write(1, b"step 1 loss 1.0\\n")
LOGS = "runs/script/*/events/*/*.jsonl"
while not any("generation_started" in open(log).read() for log in glob.glob(LOGS)):
    time.sleep(0.01)  # until it is known who says it
for step in range(2, 31):
    os.write(1, (b"x" * 99 + b"\\n") * 30000 + b"step %d loss 1.0\\n" % step)
"""
ONCE = 'd = os.environ["CHAOS_SCRATCH"] + "/once"; os.path.exists(d) or (os.mkdir(d), os._exit(1))'
PIPED = (
    f'for r in 0 1; do RANK=$r WORLD_SIZE=2 LATE_S=0.2 bash -c "{PYTHON} steps.py | cat" &'
    " done; wait"
)


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A trainer that knows nothing of anybody."""
    (tmp_path / "steps.py").write_text(STEPS)
    return tmp_path


def test_stopping_a_command_in_a_pipe_stops_it(steps: Path) -> None:
    fault = "{id: hit, kind: process-stop, target: {rank: 0}, at: {step: 12}, duration: 1s}"
    argv = ["bash", "-c", f"{PYTHON} steps.py | tee -a log"]
    scenario = write(steps / "s.yaml", argv, fault=fault, ranks=1, invariants=observed.OBSERVABLE)
    code, results = run(steps, scenario)
    assert code == 0, results.reason
    (cell,) = results.cells
    assert cell.unjudged == observed.LACKING and not cell.unjudged.keys() & cell.invariants.keys()
    times = {e.step: e.time_ns for e in events(steps, Kind.STEP_REPORTED)}
    assert (
        max(b - a for a, b in zip(list(times.values())[:-1], list(times.values())[1:], strict=True))
        > 8e8
    )
    assert len(events(steps, Kind.GENERATION_STARTED)) == 1


@pytest.mark.long
def test_helpers_of_a_script_in_front_are_no_ranks(steps: Path) -> None:
    shim = steps / "python-of-some-version"
    helpers = f"for i in 1 2 3 4; do {PYTHON} -c 'import time; time.sleep(0.1)'; done"
    shim.write_text(f'#!/bin/bash\n{helpers}\nexec {PYTHON} "$@"\n')
    shim.chmod(0o755)
    fault = "{id: hit, kind: process-stop, target: {rank: 0}, at: {step: 12}, duration: 0.2s}"
    argv = ["./python-of-some-version", "steps.py"]
    code, results = run(steps, write(steps / "s.yaml", argv, fault=fault, ranks=1))
    assert code == 0, results.reason
    assert (
        len(events(steps, Kind.PROCESS_SPAWNED)) == len(events(steps, Kind.GENERATION_STARTED)) == 1
    )


def test_a_flood_of_output_is_heard_to_its_end_and_not_kept(tmp_path: Path) -> None:
    (tmp_path / "flood.py").write_text(FLOOD)
    _, results = run(
        tmp_path, write(tmp_path / "s.yaml", [sys.executable, "flood.py"], ranks=1, fault="")
    )
    assert results.arms[0].outcome == "completed", results.reason
    assert results.arms[0].committed_step == 30
    (log,) = (tmp_path / "runs/script/latest").glob("**/output.log")
    kept = log.read_bytes()
    assert len(kept) < outputlog.KEPT_HEAD + outputlog.KEPT_TAIL + 1000
    assert b"bytes of output are left out here]" in kept and kept.endswith(b"step 30 loss 1.0\n")
    assert b"\0" not in kept


@pytest.mark.parametrize(
    ("end", "restarts"),
    [
        ("sys.exit(1)", 0),
        pytest.param("time.sleep(60)", 0, marks=pytest.mark.long),
        pytest.param(ONCE, 1, marks=pytest.mark.long),
    ],
)
def test_a_command_that_fails_by_itself_proves_nothing(
    steps: Path, end: str, restarts: int
) -> None:
    (steps / "steps.py").write_text(STEPS + f"    if step == 20: {end}\n")
    fault = "{id: hit, kind: process-stop, target: {rank: 0}, at: {step: 12}, duration: 0.2s}"
    argv = [sys.executable, "steps.py"]
    again = f"  restarts: {restarts}"
    scenario = write(
        steps / "s.yaml",
        argv,
        fault=fault,
        ranks=1,
        baseline="paired",
        deadline="2s" if "sleep" in end else "120s",
        workload=again,
    )
    code, results = run(steps, scenario)
    assert code == 3, results.reason
    assert "without a" in results.reason


@pytest.mark.long
@pytest.mark.skipif(lacks_mount() is not None, reason=f"{lacks_mount()}")
def test_a_full_disk_that_nobody_writes_to_proves_nothing(steps: Path) -> None:
    fault = "{id: full, kind: disk-full, at: {step: 12}, duration: 0.2s}"
    argv = [sys.executable, "steps.py"]
    code, results = run(steps, write(steps / "s.yaml", argv, fault=fault, ranks=1))
    assert code == 3
    assert "never wrote into $CHAOS_SCRATCH" in results.reason
