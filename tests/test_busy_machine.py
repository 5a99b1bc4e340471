"""Arms beside processor hogs, for real: nobody is blamed for a machine that is too busy. ``AA_RUNS`` says how many
(``make soak``: 4; a release: 40)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from test_real import run

from chaos.events import Kind, read_log

pytestmark = [pytest.mark.real, pytest.mark.soak]

HOGS = 4
RUNS = int(os.environ.get("AA_RUNS", "4"))
GPT = "{kind: gpt, size: nano, ranks: 4, steps: 80, global_batch: 16, checkpoint: {every: 40}}"
KILL = "[{id: kill, kind: process-kill, target: {select: one}, at: {step: 20, phase: backward}}]"


@contextmanager
def hogs() -> Iterator[None]:
    """Processes that use all that they get."""
    with ExitStack() as stack:
        for _ in range(HOGS):
            hog = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(hog.wait)
            stack.callback(hog.kill)
        yield


@pytest.mark.timeout(300 + 120 * RUNS)
@pytest.mark.parametrize("faults", ["[]", KILL], ids=["a-a", "recovered"])
def test_no_healthy_arm_fails_beside_processor_hogs(faults: str, tmp_path: Path) -> None:
    with hogs():
        _, results = run(tmp_path, workload=GPT, recovery="hot-spare", faults=faults, more=f"repeat: {RUNS}")
    found = {(arm.id, name): f for arm in results.arms for name, f in arm.invariants.items()}
    assert {where: f.witness for where, f in found.items() if f.verdict == "fail"} == {}
    assert len(results.arms) == 2 * RUNS
    print(
        *(f"{arm}: {f.verdict}: {f.witness}" for (arm, name), f in found.items() if name == "liveness"),
        sep="\n",
    )
    for arm in results.arms:
        log = read_log(tmp_path / "runs/real/latest" / arm.events)
        assert list(log.of(Kind.PRESSURE_READ)), "arms record what they had of the processors"
