"""Estimates how much longer everything takes when many ranks share the processors of one
machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from trainchaos.chaos.scenario.model import Scenario

FEW = 4
"""Ranks of the workloads' ``typical_step_s``, which is measured on two cores."""
RANK_STEP_S = 0.01
"""Processor seconds that a rank adds to each step, whatever it computes, before messages."""
RANK_START_S = 0.2
"""Processor seconds that a rank adds to the start and end of an arm."""
WORTH_SAYING = 4.0
"""Ranks per processor from which on a plan warns: hang limits and step times are dominated by ranks
that wait for processors.
"""
HERE = ("local", "agents", "docker")
"""Launchers that start ranks on this machine."""


def cores_here() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))


def step_s(scenario: Scenario, cores: int) -> float:
    """Seconds that a step takes beyond one of a few ranks; at least 0.

    Each rank has work of its own, and a ring of n ranks exchanges 2 (n - 1) messages with each of
    them: 0.005 n (1 + n / 30) fits steps of 0.024, 0.117, 0.42 and 2.2 s with 4, 16, 40 and 100
    ranks of the nano model on two cores, to 15 %.
    """
    if not _crowds(scenario):
        return 0.0
    return max(0.0, _load(scenario.workload.ranks) - _load(FEW)) * RANK_STEP_S / cores


def start_s(scenario: Scenario, cores: int) -> float:
    """Seconds that an arm's start and end take beyond those of a few ranks."""
    if not _crowds(scenario):
        return 0.0
    return max(0, scenario.workload.ranks - FEW) * RANK_START_S / cores


def crowd_warnings(scenarios: Iterable[Scenario], cores: int) -> tuple[str, ...]:
    """A warning if the ranks of a cell have far fewer processors than they need, for the most
    crowded one.
    """
    crowded = [
        scenario
        for scenario in scenarios
        if _crowds(scenario) and scenario.workload.ranks >= WORTH_SAYING * cores
    ]
    if not crowded:
        return ()
    worst = max(crowded, key=lambda scenario: scenario.workload.ranks)
    longer = f"each step takes about {step_s(worst, cores):.1f} s longer than with {FEW} ranks, and"
    if worst.workload.command is not None:  # what its ranks do in a step is not known
        longer = "each waits for the others, and"
    return (
        f"warning: {worst.workload.ranks} ranks share {cores}"
        f" {'core' if cores == 1 else 'cores'}: {longer} times measured here are those of a crowded"
        " machine",
    )


def _load(ranks: int) -> float:
    return ranks * (1 + ranks / 30)


def _crowds(scenario: Scenario) -> bool:
    return scenario.launcher.kind in HERE and scenario.workload.device != "cuda"
