"""The configuration that a simulated rank starts with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import ConfigDict

from trainchaos.chaos.scenario.workload import EvaluateSpec
from trainchaos.recovery.checkpoint.files.checkpoints import Disk
from trainchaos.recovery.policy.jobconfig import JobConfig

MS = 1_000_000
WALL_NS = 1_767_225_600_000 * MS  # 2026-01-01: a log must not show when it was simulated
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


class RankConfig(JobConfig):
    """What a real rank is told of its job, and besides: the directory of its log, in-memory
    checkpoints without a keeper's socket, and what its world does.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    events: Path
    checkpoint_dir: Path
    memory_every: int | str = 0
    evaluate: EvaluateSpec | None = None
    timings: Timings
    disk: Disk | None = None
