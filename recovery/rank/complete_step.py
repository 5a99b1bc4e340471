"""Applies a step's reduced gradients and commits it, also when only other ranks have done so yet.

The last collective of a sharded step may complete on some ranks only. The other ranks lack only its
result, which they receive in the next generation, so that no shard is left a step behind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.collectives.group import GenerationLost, Group
from trainchaos.recovery.collectives.reduce import Reduced
from trainchaos.recovery.policy.interval import Wanted, compared, counts
from trainchaos.recovery.state.fingerprint import fingerprint
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.wire import Digest

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import Job
    from trainchaos.recovery.rank.step import Step


def complete(job: Job, step: Step, reduced: Reduced, *, late: bool = False) -> None:
    """Apply the reduced gradients with the optimizer, and commit. ``late``: other ranks committed
    this step in an earlier generation and have gone on.
    """
    lr = _apply(job, step, reduced)
    if not late:
        step.end_phase()
    _log_commit(job, step, reduced, lr)
    if job.live is not None:  # after the log: what a spare holds is committed
        job.live.feeds.after(job.state, job.reducer, reduced.loss)
    job.marks.commit(step.number)
    job.pausing = reduced.asks.pause
    if job.probe is not None:
        job.probe.committed(step.number)
    config = job.config
    saving = counts(step.number, config.checkpoint_every, asked=reduced.asks.save)
    if saving or step.number == config.steps:
        digests = job.state.digests(job.marks.touch)
        job.write(Kind.STATE_DIGEST, step=step.number, rank=job.rank, **digests)
    if late:
        return
    _tell_digest(job, step.number, saving=saving)
    asked = Wanted(disk=reduced.asks.save, memory=reduced.asks.save_memory)
    with job.generations.with_own(asked):
        job.checkpoints.after_commit(
            step.number,
            rank=job.rank,
            layout=job.layout,
            generation=job.generation,
            asked=asked,
            pausing=reduced.asks.pause,
        )
    job.marks.enter(progress_counters.BETWEEN)


def _tell_digest(job: Job, step: int, *, saving: bool) -> None:
    """Send the supervisor a digest of the state after ``step``, if one is due and other ranks hold
    the same state. ``saving``: a checkpoint of this step is due.
    """
    due = compared(step, every=job.config.verify_every, steps=job.config.steps, saving=saving)
    if due and job.layout.replicas > 1:
        digest = Digest(
            generation=job.generation, step=step, digest=fingerprint(job.state, job.marks.touch)
        )
        if job.live is not None:
            job.live.feeds.check(step, digest.digest)
        job.agent.digest = digest
        job.agent.channel.send(digest)


def _apply(job: Job, step: Step, reduced: Reduced) -> float | None:
    """Apply the step; returns the learning rate it was done with, None: the optimizer has none."""
    state = job.state
    state.attempt.applied()
    job.member.holding.applied()
    lr = state.optimizer.param_groups[0].get("lr")
    if job.clip_norm:
        job.reducer.clip(reduced.grad_norm, job.clip_norm)
    if job.live is not None:
        job.live.feeds.before(state, job.reducer)
    state.apply(reduced.loss)
    state.step, state.last = step.number, figures_of(step.number, reduced)
    return None if lr is None else float(lr)


def _log_commit(job: Job, step: Step, reduced: Reduced, lr: float | None) -> None:
    job.write(
        Kind.STEP_COMMITTED,
        step=step.number,
        rank=job.rank,
        world=job.world,
        samples=reduced.samples,
        loss=reduced.loss,
        lr=lr,
        wire_bytes=job.reducer.wire_bytes,
        grad_norm=reduced.grad_norm,
        optimizer_step=job.state.optimizer_step(),
        scheduler_step=job.state.scheduler_step(),
        seconds={k: round(v, 6) for k, v in step.seconds.items()},
    )


def figures_of(step: int, reduced: Reduced) -> list[float]:
    """The figures kept of an applied step: number, loss, samples, gradient norm."""
    return [float(step), reduced.loss, float(reduced.samples), reduced.grad_norm]


def exchange_totals(step: int, last: list[float], group: Group, device: str) -> Reduced:
    """The totals that all ranks knew when ``step`` was applied; a collective of every rank of the
    group. ``last``: what this rank has noted. Raises GenerationLost, also when no rank knows.
    """
    known = last[1:] if last and last[0] == step else [-math.inf] * 3
    word = torch.tensor(known, dtype=torch.float64, device=device)
    everyone = group.everyone
    # MAX instead of a sum keeps the values the same to the last bit.
    everyone.wait(everyone.start_all_reduce(word, dist.ReduceOp.MAX))
    loss, samples, norm = everyone.read(word)
    if samples < 0:
        raise GenerationLost(f"nobody knows how step {step} ended")
    return Reduced(loss=loss, samples=round(samples), blamed=(), grad_norm=norm)
