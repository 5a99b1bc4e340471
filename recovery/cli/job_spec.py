"""Describes a supervised job, and configures each of its processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainchaos.recovery.cli.process_host import ProcessPlacement
from trainchaos.recovery.policy.jobconfig import Exchange, InMemory, NetworkAddresses, Saves
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.policy.strategy import Strategy
from trainchaos.recovery.rank.joining import SupervisorSettings
from trainchaos.recovery.rank.script import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What to run. ``shards``: ranks that hold one copy of the model; ``mesh``: how they are
    arranged; ``checkpoint_*`` None: as the script says; ``memory_every``: between checkpoints in
    memory, 0: none, and ``memory_bytes`` for them; ``fresh``: begin with initial values, even if
    checkpoints exist; ``log_limit_bytes``: for event logs, and for the output of ranks (in
    ``logs``).
    """

    script: Path
    args: tuple[str, ...]
    ranks: int
    events: Path
    exchange: Exchange
    checkpoint_dir: Path | None
    checkpoint_every: int | str | None
    checkpoint_keep: int | None
    shards: int = 1
    mesh: Mesh | None = None
    saves: Saves | None = None
    verify_every: int | None = None
    log_limit_bytes: int = 10_000_000_000
    logs: Path | None = None
    memory_every: int | str = 0
    memory_bytes: int = 4_000_000_000
    fresh: bool = False


def script_config(
    spec: JobSpec,
    strategy: Strategy,
    name: str,
    role: str,
    spot: ProcessPlacement,
    *,
    store_host: str,
    job_id: str,
    memory: InMemory | None,
) -> ScriptConfig:
    """Configuration of the process ``name`` when it starts at a spot. ``role``: worker or spare;
    ``store_host``: where the key-value store listens; ``memory``: its keeper, None: it has none.
    """
    seat = SupervisorSettings(
        supervisor="trainchaos.recovery.run",
        process=name,
        world=spec.ranks,
        shards=spec.shards,
        mesh=spec.mesh,
        batch=strategy.batch_policy,
        backend=spec.exchange.backend,
        shared_gpus=spec.exchange.shared_gpus,
        device=spot.device,
        net=NetworkAddresses(store_host=store_host, address=spot.address),
        restores=not strategy.keeps_survivors,
        checkpoint_dir=spec.checkpoint_dir,
        checkpoint_every=spec.checkpoint_every,
        checkpoint_keep=spec.checkpoint_keep,
        saves=spec.saves,
        memory=memory,
        verify_every=spec.verify_every,
        nonfinite=strategy.nonfinite_policy,
        sync=strategy.spare_sync.sync,
        sync_lag=strategy.spare_sync.lag,
        rehearse=strategy.spare_sync.rehearse and role == "spare",
        fresh=spec.fresh,
        job_id=job_id,
    )
    return ScriptConfig(
        name=name,
        parent=0,
        events=spot.events,
        log=spot.logs / f"{name}.log" if spot.logs else None,
        path=spec.script,
        args=list(spec.args),
        seat=seat,
    )
