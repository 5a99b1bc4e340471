"""Builds the configuration that each rank process of an arm starts with."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

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
    return devices.placement(spec, _device_count(), strategy_of(setup).spares_wanted)


def strategy_of(setup: ArmSetup) -> Strategy:
    """The recovery strategy of the arm's cell."""
    return strategy_for(setup.cell)


def strategy_for(cell: Cell) -> Strategy:
    """The recovery strategy of a cell."""
    spec = cell.scenario.recovery
    return plugins.load(plugins.STRATEGIES, Strategy)[spec.strategy](**spec.params)


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """The environment of a process on its node. ``events``, ``logs``: directories for its event log
    and its output; ``device``: one of its node's devices; ``memory``: in-memory checkpoints there,
    if the cell has them; ``door``: address of the link proxy, if there is one; ``group``: name of
    the control groups, if faults need some.
    """

    events: Path
    logs: Path
    device: str
    exchange: Exchange
    net: NetworkAddresses = field(default_factory=NetworkAddresses)
    memory: InMemory | None = None
    door: Address | None = None
    group: str | None = None


def rank_config(
    setup: ArmSetup, environment: RankEnvironment, *, name: str, role: str
) -> RankConfig:
    """Configuration of one process; ``parent`` is the calling process."""
    scenario = setup.cell.scenario
    spec = scenario.workload
    strategy = strategy_of(setup)
    device = devices.torch_name(environment.device)
    job = {
        "process": name,
        "world": spec.ranks,
        "shards": spec.shards,
        "mesh": spec.mesh and spec.mesh.grid,
        "determinism": spec.determinism,
        "steps": spec.steps,
        "global_batch": spec.global_batch,
        "samples": setup.data.samples,
        "seed": setup.seed,
        "batch": strategy.batch_policy,
        "backend": environment.exchange.backend,
        "shared_gpus": environment.exchange.shared_gpus,
        "device": device,
        "net": environment.net.model_dump(),
        "memory": environment.memory and environment.memory.model_dump(mode="json"),
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
    return RankConfig(
        name=name,
        role=role,
        parent=os.getpid(),
        events=environment.events,
        log=environment.logs / f"{name}.log",
        run=setup.token,
        workload=spec.kind,
        workload_params=spec.params,
        data=setup.data.path.absolute(),
        device=device,
        threads=1,
        job=job,
        link_proxy=environment.door,
        group=environment.group,
        faults=tuple(sorted({f.kind for f in scenario.faults if setup.arm == "faulted"})),
        evaluate=spec.evaluate,
        pipeline=spec.mesh and (spec.mesh.schedule, spec.mesh.microbatches),
    )
