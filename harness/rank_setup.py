"""What each rank process of an arm is told at birth."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

from chaos import plugins
from harness import devices
from harness.launcher import ArmSetup
from harness.rank import RankConfig
from recovery.strategy import Strategy


@cache
def _device_count() -> int:
    return len(devices.cuda_devices())


def rank_config(setup: ArmSetup, *, name: str, role: str, taken: Sequence[str]) -> RankConfig:
    """Configuration of one process. ``taken``: devices of the arm's living processes."""
    scenario = setup.cell.scenario
    spec = scenario.workload
    strategy = plugins.load("recovery.strategies", Strategy)[scenario.recovery.strategy](
        **scenario.recovery.params
    )
    places, backend = devices.placement(spec, _device_count(), strategy.spares_wanted)
    job = {
        "process": name,
        "world": spec.ranks,
        "steps": spec.steps,
        "global_batch": spec.global_batch,
        "samples": setup.data.samples,
        "seed": setup.seed,
        "batch": strategy.batch_policy,
        "backend": backend,
        "checkpoint_dir": str(setup.checkpoints),
        "checkpoint_every": spec.checkpoint.every,
        "checkpoint_keep": spec.checkpoint.keep,
    }
    return RankConfig(
        name=name, role=role, parent=os.getpid(), events=setup.run.events(setup.id),
        log=setup.run.logs(setup.id) / f"{name}.log", workload=spec.kind, workload_params=spec.params,
        data=setup.data.path, device=devices.least_used(places, taken), threads=1, job=job,
    )  # fmt: skip
