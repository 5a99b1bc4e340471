"""The catalogue is whole: every kind that users are promised is there, documented, and shown by a
scenario.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from trainchaos.chaos import plugins
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.loading.builtin import NO_SCENARIOS

ROOT = Path(__file__).parents[2]
FAULTS = plugins.load(plugins.FAULTS, Fault)
PROMISED = {
    "process-kill",
    "process-stop",
    "process-term",
    "process-segv",
    "exception",
    "gil-deadlock",
    "collective-skip",
    "oom-kill",
    "crash-loop",
    "node-kill",
    "node-isolate",
    "rack-kill",
    "spare-kill",
    "coordinator-kill",
    "store-kill",
    "gpu-lost",
    "gpu-error",
    "gpu-oom",
    "gpu-hang",
    "straggler",
    "health-event",
    "link-throttle",
    "link-delay",
    "link-loss",
    "link-flap",
    "partition",
    "tensor-corrupt",
    "replica-desync",
    "poison-sample",
    "checkpoint-corrupt",
    "disk-full",
    "io-error",
    "io-slow",
    "read-only",
    "data-stall",
    "data-corrupt",
    "heartbeat-drop",
    "store-latency",
    "clock-skew",
    "node-stop",
    "node-slow",
    "rank-hang",
}
SCENARIOS = [
    path
    for path in sorted((ROOT / "scenarios").rglob("*.yaml"))
    if not path.name.endswith(NO_SCENARIOS)
]


@cache
def kinds_in(path: Path) -> set[str]:
    """Fault kinds that a scenario file names."""
    tree = YAML(typ="safe", pure=True).load(path.read_text())
    return {fault["kind"] for fault in tree.get("faults", [])}


def test_every_promised_kind_is_there() -> None:
    assert set(FAULTS) == PROMISED


@pytest.mark.parametrize("name", FAULTS)
def test_every_kind_is_shown_by_a_scenario(name: str) -> None:
    assert any(name in kinds_in(path) for path in SCENARIOS)


def test_there_are_scenarios_enough() -> None:
    assert len(SCENARIOS) >= 25


@pytest.mark.parametrize("name", FAULTS)
def test_the_docstring_says_mechanism_fidelity_and_witness(name: str) -> None:
    text = FAULTS[name].__doc__ or ""
    assert "Landed:" in text
    assert any(word in text for word in ("Real", "real", "Emulated", "emulated"))
