"""Builds the configuration that each rank process of an arm starts with."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from trainchaos.chaos import plugins
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.launch import devices
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launch.links.route import Address
from trainchaos.harness.launch.rank_config import RankConfig
from trainchaos.recovery.policy.jobconfig import Exchange, InMemory, NetworkAddresses
from trainchaos.recovery.policy.strategy import Strategy


@cache
def _device_count() -> int:
    return len(devices.cuda_devices())


def places(setup: ArmSetup) -> tuple[list[str], Exchange]:
    """This machine's devices, to hand out to the arm's processes, and the exchange between them."""
    spec = setup.cell.scenario.workload
    return devices.placement(spec, _device_count(), strategy_for(setup.cell).spares_wanted)


def strategy_for(cell: Cell) -> Strategy:
    """The recovery strategy of a cell."""
    spec = cell.scenario.recovery
    return plugins.load(plugins.STRATEGIES, Strategy)[spec.strategy](**spec.params)


def rank_config(
    setup: ArmSetup,
    *,
    name: str,
    role: str,
    events: Path,
    logs: Path,
    device: str,
    exchange: Exchange,
    net: NetworkAddresses | None = None,
    memory: InMemory | None = None,
    door: Address | None = None,
    group: str | None = None,
) -> RankConfig:
    """Configuration of one process; ``parent`` is the calling process. ``events``, ``logs``:
    directories on its node for its event log and its output; ``device``: one of its node's devices;
    ``memory``: in-memory checkpoints there, if the cell has them; ``door``: address of the link
    proxy, if there is one; ``group``: name of the control groups, if faults need some.
    """
    spec = setup.cell.scenario.workload
    device = devices.torch_name(device)
    job = job_of(setup, role) | {
        "process": name,
        "backend": exchange.backend,
        "shared_gpus": exchange.shared_gpus,
        "device": device,
        "net": (net or NetworkAddresses()).model_dump(),
        "memory": memory and memory.model_dump(mode="json"),
    }
    return RankConfig(
        name=name,
        role=role,
        parent=os.getpid(),
        events=events,
        log=logs / f"{name}.log",
        run=setup.token,
        workload=spec.kind,
        workload_params=spec.params,
        data=setup.data.path.absolute(),
        device=device,
        threads=1,
        job=job,
        link_proxy=door,
        group=group,
        faults=tuple(
            sorted({f.kind for f in setup.cell.scenario.faults if setup.arm == "faulted"})
        ),
        evaluate=spec.evaluate,
        pipeline=spec.mesh and (spec.mesh.schedule, spec.mesh.microbatches),
    )


def job_of(setup: ArmSetup, role: str) -> dict[str, Any]:
    """What holds for a process of the arm wherever it is: fields of a JobConfig."""
    spec, strategy = setup.cell.scenario.workload, strategy_for(setup.cell)
    return {
        "world": spec.ranks,
        "shards": spec.shards,
        "mesh": spec.mesh and spec.mesh.grid,
        "determinism": spec.determinism,
        "steps": spec.steps,
        "global_batch": spec.global_batch,
        "samples": setup.data.samples,
        "seed": setup.seed,
        "batch": strategy.batch_policy,
        "job_id": f"{setup.id}-{setup.seed}",
        "checkpoint_dir": str(setup.checkpoints.absolute()),
        "checkpoint_every": spec.checkpoint.every,
        "checkpoint_keep": spec.checkpoint.keep,
        "verify_every": spec.verify_every,
        "nonfinite": strategy.nonfinite_policy,
        "sync": strategy.spare_sync.sync,
        "sync_lag": strategy.spare_sync.lag,
        "rehearse": strategy.spare_sync.rehearse and role == "spare",
        "saves": {
            "mode": spec.checkpoint.mode,
            "sharded": spec.checkpoint.sharded,
            "delta": spec.checkpoint.delta or 1,
            "mtbf_s": spec.checkpoint.mtbf,
        },
    }
