"""Arms beside processor hogs, for real: nobody is blamed for a machine that is too busy.
``AA_RUNS`` says how many (by default 4; a release: 40), beside hogs as urgent as the ranks;
half as many where hogs are niced.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness.run.test_real import run
from tests.support.hogs import URGENCIES, hogs
from trainchaos.chaos.events.log import Kind, read_log

pytestmark = [pytest.mark.real, pytest.mark.long]

RUNS = int(os.environ.get("AA_RUNS", "4"))
LIMIT_S = 300 + 120 * RUNS
GPT = "{kind: gpt, size: nano, ranks: 4, steps: 80, global_batch: 16, checkpoint: {every: 40}}"
KILL = "[{id: kill, kind: process-kill, target: {select: one}, at: {step: 20, phase: backward}}]"


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("nice", URGENCIES.values(), ids=URGENCIES)
@pytest.mark.parametrize("faults", ["[]", KILL], ids=["a-a", "recovered"])
def test_no_healthy_arm_fails_beside_processor_hogs(faults: str, nice: int, tmp_path: Path) -> None:
    runs = max(1, RUNS // 2) if nice else RUNS
    with hogs(nice, at_most_s=LIMIT_S):
        _, results = run(
            tmp_path, workload=GPT, recovery="hot-spare", faults=faults, more=f"repeat: {runs}"
        )
    found = {(arm.id, name): f for arm in results.arms for name, f in arm.invariants.items()}
    assert {where: f.witness for where, f in found.items() if f.verdict == "fail"} == {}
    assert len(results.arms) == 2 * runs
    print(
        *(
            f"{arm}: {f.verdict}: {f.witness}"
            for (arm, name), f in found.items()
            if name == "liveness"
        ),
        sep="\n",
    )
    for arm in results.arms:
        log = read_log(tmp_path / "runs/real/latest" / arm.events)
        assert list(log.of(Kind.PRESSURE_READ)), "arms record what they had of the processors"
