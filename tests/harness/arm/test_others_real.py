"""What a run says of other programs that used its machine while it trained."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.run.test_real import stored, write
from tests.support.hogs import hogs
from trainchaos.chaos.errors import EXIT_INCONCLUSIVE

pytestmark = [pytest.mark.real, pytest.mark.long]
TINY = "{kind: mlp, ranks: 2, steps: 200, global_batch: 16, checkpoint: {every: 100, keep: 2}}"
LIMIT_S = 120.0


def told(folder: Path) -> str:
    """What a run of its own process tells a person."""
    path = write(
        folder / "real.yaml", workload=TINY, recovery="drop-replica", faults="[]", more="repeat: 1"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "trainchaos", "run", str(path), "--runs", str(folder / "runs")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == EXIT_INCONCLUSIVE, ran.stdout + ran.stderr  # as there are no faults
    return ran.stdout + ran.stderr


def test_programs_that_use_the_machine_meanwhile_are_named_at_once_and_beside_the_verdict(
    tmp_path: Path,
) -> None:
    with hogs():
        text = told(tmp_path)
    arms = stored(tmp_path).arms
    cpus = os.cpu_count() or 1
    for arm in arms:  # four hogs are on two processors with the arm, which gets a part of them
        assert arm.others is not None and 0.25 * cpus <= arm.others <= 2.0, arms
    # after each arm; as a warning before the first, and beside the verdict, as of the arms
    assert text.count("programs used") == len(arms) + 3
    assert f"much of the machine in {len(arms)} of {len(arms)} arms" in text
