"""The configuration that a simulated rank starts with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos.scenario.workload import EvaluateSpec
from trainchaos.recovery.checkpoint.files.checkpoints import Disk

MS = 1_000_000
_SHARES = {"data": 0.03, "forward": 0.3, "backward": 0.5, "collective": 0.1, "optimizer": 0.07}


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Durations, in milliseconds.

    ``jitter``: relative variation of each; ``spread_ms``: between the first and the last member to
    get the result of a collective; ``wire_bytes``: size of the gradients; ``follows_share``: how
    much of a step's forward and backward follows the rank's share of the batch.
    """

    step_ms: float
    jitter: float
    spawn_ms: float
    cold_spawn_ms: float
    teardown_ms: float
    form_ms: float
    transfer_ms: float
    checkpoint_ms: float
    spread_ms: float
    wire_bytes: int
    follows_share: float = 0.0

    def phase_ns(self, phase: str) -> float:
        """A phase's share of the step, nanoseconds."""
        return _SHARES[phase] * self.step_ms * MS


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """As ``recovery.rank.job.JobConfig``, plus the directory of the log."""

    events: Path
    world: int
    shards: int
    alike: int
    steps: int
    global_batch: int
    samples: int
    seed: int
    batch: str
    determinism: str
    checkpoint_dir: Path
    verify_every: int | None
    nonfinite: str
    checkpoint_every: int | str
    memory_every: int | str
    checkpoint_keep: int
    checkpoint_mode: str
    checkpoint_sharded: bool
    checkpoint_mtbf_s: float | None
    wall_ns: int
    timings: Timings
    disk: Disk | None = None
    evaluate: EvaluateSpec | None = None
    sync: str = "none"
    sync_lag: int = 4
