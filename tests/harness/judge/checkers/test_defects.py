"""Implementations with one defect each, simulated: each turns its own checker red, and a clean one
none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.arms import FAIL, LEFT_OPEN, OPEN, judged
from tests.support.search import defects
from tests.support.search.simulate import KILL, Played, cell_of, evidence, play
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.recovery.policy.strategy import Strategy

SEED = 5
HANG = {**KILL, "kind": "process-stop"}
NAN = {
    **KILL,
    "id": "nan",
    "kind": "tensor-corrupt",
    "params": {"surface": "gradient", "op": "nan"},
}
CORRUPT = {
    "id": "corrupt",
    "kind": "checkpoint-corrupt",
    "params": {"mode": "bitflip"},
    "target": {"checkpoint": "latest"},
    "at": {"event": "checkpoint_committed", "nth": 3},
}
FULL = {"id": "full", "kind": "disk-full", "at": {"step": 15}, "duration": {"steps": 10}}
RESTART, DROP, SPARE = "checkpoint-restart", "drop-replica", "hot-spare"
SMALLER = {"strategy": DROP, "rejoin": False}

Defect = Callable[[], Behaviour | Strategy]
DEFECTS: dict[str, tuple[Any, list[dict[str, Any]], Defect, dict[str, str]]] = {
    "a batch is skipped": (
        DROP,
        [KILL],
        lambda: defects.OtherBatch(1),
        {"sample-accounting": FAIL},
    ),
    "a batch is replayed": (
        DROP,
        [KILL],
        lambda: defects.OtherBatch(-1),
        {"sample-accounting": FAIL},
    ),
    "an older checkpoint is restored": (
        RESTART,
        [KILL],
        defects.RestoresOlder,
        {"no-lost-commit": FAIL},
    ),
    "a corrupt checkpoint is restored": (
        RESTART,
        [CORRUPT, KILL],
        defects.RestoresUnverified,
        {"checkpoint-integrity": FAIL},
    ),
    "random generators begin anew": (
        RESTART,
        [KILL],
        defects.ForgetsRandomness,
        {"loss-equality": FAIL},
    ),
    "a zombie commits": (SPARE, [HANG], defects.Zombie, {"single-writer": FAIL}),
    # The state is refused after the last step, far from the fault, and all go back to before it.
    "a NaN is committed": (
        DROP,
        [NAN],
        defects.CommitsNan,
        {"nan-containment": FAIL, "detection": FAIL},
    ),
    "the learning rate is scaled": (SMALLER, [KILL], defects.ScalesRate, {"step-arithmetic": FAIL}),
    "a peer sends old state": (DROP, [KILL], defects.StalePeer, {"replica-equality": FAIL}),
    "another rank is blamed": (SPARE, [NAN], defects.BlamesAnother, {"detection": FAIL}),
    "a member's share is dropped": (SMALLER, [KILL], defects.DropsShare, {"step-arithmetic": FAIL}),
    "the injector does nothing": (SPARE, [KILL], defects.DeafOnce, {"fault-landed": OPEN}),
    # Nobody saw it exit, so nobody knows how its log should end either.
    "a process is left": (
        SPARE,
        [KILL],
        lambda: defects.Immortal("w1"),
        {**LEFT_OPEN, "no-orphans": FAIL},
    ),
    "the last line is lost": (SPARE, [KILL], defects.LosesLine, LEFT_OPEN),
    "a failure is not answered": (DROP, [KILL], defects.DoesNothing, {"liveness": FAIL}),
    "a failed save ends the rank": (
        SPARE,
        [FULL],
        defects.DiesOfFailedSave,
        {"checkpoint-integrity": FAIL},
    ),
    "a sample is left out silently": (
        DROP,
        [KILL],
        defects.LeavesOutSilently,
        {"sample-accounting": FAIL, "step-arithmetic": FAIL},
    ),
    "a spare is not used": (SPARE, [KILL], defects.NeverSwaps, {"membership": FAIL}),
}


def arms(
    cell: Cell, root: Path, defect: Behaviour | Strategy | None = None
) -> tuple[Played, Played]:
    """The faulted arm, with a defect, and a clean control arm."""
    behaviour = defect if isinstance(defect, Behaviour) else None
    strategy = defect if isinstance(defect, Strategy) else None
    faulted = play(cell, root, seed=SEED, behaviour=behaviour, strategy=strategy)
    return faulted, play(cell, root, seed=SEED, arm="control")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_turns_its_checker_red_and_no_other(name: str, memory: Path) -> None:
    recovery, faults, defect, expected = DEFECTS[name]
    # Without the comparison of replicas that would mend some of it: the checkers are on trial here.
    cell = cell_of(recovery, faults, verify_every=0)
    findings = judged(evidence(*arms(cell, memory, defect())))
    found = {checker: finding for checker, finding in findings.items() if finding.verdict != "pass"}
    assert {checker: finding.verdict for checker, finding in found.items()} == expected, found
