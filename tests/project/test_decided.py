"""Verdicts that only a quieter machine would decide fail no test, and no others are excused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.decided import but_for_noise
from trainchaos.chaos.errors import EXIT_FAIL, EXIT_INCONCLUSIVE, EXIT_PASS
from trainchaos.harness.judge.measure.pressure import TOO_BUSY

RATE = "r0.faulted: step 60 of 60; the last 40 healthy steps at 0.49 of the rate of the"
BUSY = f"r0.faulted: {TOO_BUSY}its ranks stood in a run queue"
RERUN = f"{RATE}; but at 1.03 of its own: run it on a quieter machine"
SHORT = f"{RATE}; but in 0.21 s in all, too short to tell: raise workload"
DUE = "r0.faulted: f was due at step 70, the run ended at 60"
OPEN = EXIT_INCONCLUSIVE


@pytest.mark.parametrize(
    ("code", "unsure", "slas", "expected"),
    [
        (EXIT_PASS, [], [], EXIT_PASS),
        (EXIT_FAIL, [BUSY], [], EXIT_FAIL),
        (OPEN, [BUSY], [], EXIT_PASS),
        (
            OPEN,
            [BUSY, RERUN],
            [],
            EXIT_PASS,
        ),
        (OPEN, [SHORT], [], EXIT_PASS),
        (OPEN, [DUE], [], OPEN),
        (OPEN, [BUSY, DUE], [], OPEN),
        (OPEN, [BUSY], ["median needs 3 values, there are 1"], OPEN),
        (OPEN, [], [], OPEN),
    ],
)
def test_noise_alone_is_excused(
    tmp_path: Path, code: int, unsure: list[str], slas: list[str], expected: int
) -> None:
    latest = tmp_path / "real" / "latest"
    latest.mkdir(parents=True)
    invariants = {
        str(n): {"verdict": "inconclusive", "witness": one} for n, one in enumerate(unsure)
    }
    invariants["membership"] = {"verdict": "pass", "witness": "all there"}
    said = {
        "slas": [{"verdict": "inconclusive", "detail": one} for one in slas],
        "cells": [{"invariants": invariants}],
    }
    (latest / "results.json").write_text(json.dumps(said))
    assert but_for_noise(code, tmp_path) == expected


def test_without_results_nothing_is_excused(tmp_path: Path) -> None:
    assert but_for_noise(OPEN, tmp_path) == OPEN
