"""Which samples a rank computes in a step, by the job's configuration."""

from __future__ import annotations

from trainchaos.recovery.data import order
from trainchaos.recovery.data.exclusion_index import ExclusionIndex
from trainchaos.recovery.policy.jobconfig import JobConfig


class SamplePlan:
    """The global batches of a job, and their parts. ``skip``: the samples left out so far."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config

    def batch(self, number: int, skip: ExclusionIndex) -> order.Batch:
        """The global batch of a step, without excluded samples."""
        config = self._config
        return order.Batch(number, config.global_batch, config.samples, config.seed, skip)

    def micro_batches(
        self, number: int, skip: ExclusionIndex, *, rank: int, world: int
    ) -> list[order.MicroBatch]:
        """The micro-batches of a step that a rank computes. Raises RuntimeError when none is
        left.
        """
        config, ids = self._config, self.batch(number, skip)
        if not ids:
            raise RuntimeError(f"every sample of step {number} is left out")
        return order.micro_batches(
            ids,
            rank=rank,
            world=world,
            full=config.world,
            shrink=config.batch == "shrink",
            elastic=config.determinism == "elastic",
            alike=config.arranged.alike,
        )
