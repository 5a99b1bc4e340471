"""What each rank process of an arm is told at birth."""

from __future__ import annotations

import os
from functools import cache

from chaos import plugins
from harness import devices
from harness.launcher import ArmSetup
from harness.rank import RankConfig
from recovery.strategy import Strategy


@cache
def _device_count() -> int:
    return len(devices.cuda_devices())


def rank_config(setup: ArmSetup, *, name: str, role: str) -> RankConfig:
    """Configuration of one process. Devices are dealt by the number in its name, so a spare shares a GPU if it must."""
    scenario = setup.cell.scenario
    spec = scenario.workload
    strategy = plugins.load("recovery.strategies", Strategy)[scenario.recovery.strategy](**scenario.recovery.params)
    places, backend = devices.placement(spec, _device_count())
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
        data=setup.data.path, device=places[int(name[1:]) % len(places)], threads=1, job=job,
    )  # fmt: skip
