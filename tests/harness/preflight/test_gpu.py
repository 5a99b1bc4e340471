"""The same checks on an NVIDIA GPU; pairs where there are several."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from trainchaos.harness.preflight.check import HOST, Asking
from trainchaos.harness.preflight.places import ALL_CHECKS, Places, places_here
from trainchaos.harness.preflight.preflight import fit

pytestmark = pytest.mark.gpu

LIMIT_S = 200.0


def gpus(least: int) -> list[str]:
    """Places that are GPUs; skips where there are fewer."""
    found = [name for name in places_here() if name.startswith("cuda")]
    if len(found) < least:
        pytest.skip(f"needs {least} NVIDIA GPUs, there are {len(found)}")
    return found


def test_a_gpu_is_fit_and_says_its_clocks(tmp_path: Path) -> None:
    (place, *_) = gpus(1)
    found = fit(place, ("memory", "product", "clocks"), directory=tmp_path, total_s=LIMIT_S)
    assert found.fit, found
    by_check = {row.check: row for row in found.findings}
    print(*(f"{row.check}: {row.said}" for row in found.findings), sep="\n")
    assert by_check["memory"].evidence["bytes"] > 1 << 30
    assert by_check["product"].evidence["repeats"] >= 8
    assert by_check["clocks"].evidence["nvml"][-1]["clock_sm"] > 0.0


def test_gpus_exchange_over_nccl(tmp_path: Path) -> None:
    names = gpus(2)
    places = Places([*names, HOST], limit_s=LIMIT_S)
    try:
        one = Asking(places, names, tmp_path, until_s=time.monotonic() + LIMIT_S)
        one.run(ALL_CHECKS[-2:])
    finally:
        assert places.close() == []
    assert [row for row in one.findings.values() if row.state != "fit"] == []
