"""Runs in tests are repeated for what a quieter machine would decide, and for nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.decided import TRIES, until_decided
from trainchaos.chaos.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS
from trainchaos.harness.judge.measure.pressure import TOO_BUSY

RATE = "liveness: r0.faulted: step 60 of 60; the last 40 healthy steps at 0.49 of the rate of the"
OPEN = EXIT_INCONCLUSIVE


@pytest.mark.parametrize(
    ("code", "reason", "times"),
    [
        (EXIT_PASS, "1 SLAs, 21 invariants", 1),
        (EXIT_FAIL, f"{RATE} control arm, for their world, 0.50 is due", 1),
        (OPEN, "fault-landed: r0.faulted: f was due at step 70, the run ended at 60", 1),
        (OPEN, f"{TOO_BUSY}liveness: r0.faulted: its ranks stood in a run queue", TRIES),
        (OPEN, f"{TOO_BUSY}recovery=hot-spare: liveness: its ranks stood in a run queue", TRIES),
        (OPEN, f"{RATE}; but at 1.03 of its own: run it on a quieter machine", TRIES),
        (OPEN, f"{RATE}; but in 0.21 s in all, too short to tell: raise workload.steps", TRIES),
    ],
)
def test_only_noise_is_worth_another_run(
    tmp_path: Path, code: int, reason: str, times: int
) -> None:
    ran = list[int]()

    def run() -> int:
        ran.append(code)
        latest = tmp_path / "real" / "latest"
        latest.mkdir(parents=True, exist_ok=True)
        (latest / "results.json").write_text(json.dumps({"reason": reason}))
        return code

    assert until_decided(run, int, tmp_path) == code
    assert len(ran) == times


def test_the_first_that_is_decided_stands(tmp_path: Path) -> None:
    codes = [OPEN, EXIT_PASS, OPEN]
    (tmp_path / "real" / "latest").mkdir(parents=True)
    said = json.dumps({"reason": TOO_BUSY})
    (tmp_path / "real" / "latest" / "results.json").write_text(said)
    assert until_decided(lambda: codes.pop(0), int, tmp_path) == EXIT_PASS
    assert codes == [OPEN]
