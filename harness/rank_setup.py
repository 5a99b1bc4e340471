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


def places(setup: ArmSetup) -> tuple[list[str], str]:
    """Devices to deal out to the arm's processes, and the backend they can talk through."""
    spec = setup.cell.scenario.workload
    return devices.placement(spec, _device_count(), _strategy(setup).spares_wanted)


def _strategy(setup: ArmSetup) -> Strategy:
    spec = setup.cell.scenario.recovery
    return plugins.load("recovery.strategies", Strategy)[spec.strategy](**spec.params)


def rank_config(setup: ArmSetup, *, name: str, role: str, device: str) -> RankConfig:
    """Configuration of one process. ``device``: one of ``places``."""
    scenario = setup.cell.scenario
    spec = scenario.workload
    strategy, (_, backend) = _strategy(setup), places(setup)
    job = {
        "process": name,
        "world": spec.ranks,
        "shards": spec.shards,
        "determinism": spec.determinism,
        "steps": spec.steps,
        "global_batch": spec.global_batch,
        "samples": setup.data.samples,
        "seed": setup.seed,
        "batch": strategy.batch_policy,
        "backend": backend,
        "checkpoint_dir": str(setup.checkpoints),
        "checkpoint_every": spec.checkpoint.every,
        "checkpoint_keep": spec.checkpoint.keep,
        "verify_every": spec.verify_every,
        "nonfinite": strategy.nonfinite_policy,
        "saves": {
            "mode": spec.checkpoint.mode,
            "sharded": spec.checkpoint.sharded,
            "delta": spec.checkpoint.delta or 1,
            "mtbf_s": spec.checkpoint.mtbf,
        },
    }
    return RankConfig(
        name=name, role=role, parent=os.getpid(), events=setup.run.events(setup.id),
        log=setup.run.logs(setup.id) / f"{name}.log", workload=spec.kind, workload_params=spec.params,
        data=setup.data.path, device=devices.torch_name(device), threads=1, job=job,
    )  # fmt: skip
