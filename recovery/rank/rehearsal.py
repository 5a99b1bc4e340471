"""A step that a spare trains alone before it is ready, and that counts for nothing: what a first
step takes longer for than any other is behind it when it takes a place. Kernels are loaded or
compiled, memory is allocated, workers of a data loader have started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.collectives.group import GenerationLost
from trainchaos.recovery.rank.step import Step
from trainchaos.recovery.spares import replay
from trainchaos.recovery.spares.hostcopy import COPY_S, HostCopy
from trainchaos.recovery.state.fingerprint import fingerprint
from trainchaos.recovery.state.misuse import backward_as_torch_does, in_step

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import Job


class _Rehearsed(GenerationLost):
    """The step goes no further; the loop sees what it sees when a step is broken off."""


class _RehearsedStep(Step):
    """A step without other ranks: nothing is reduced, and nothing is applied."""

    def phase(self, name: str) -> None:
        """Nobody is told."""
        self._phase = name

    def check_pass(self) -> None:
        """No generation can be lost."""

    def accumulate(self, loss: Tensor) -> None:
        """See Step."""
        backward_as_torch_does(loss)

    def backward(self, loss: Tensor) -> None:
        """See Step."""
        backward_as_torch_does(loss)
        self._kept += 1

    def run(self, passes: Callable[[], Tensor]) -> None:
        """See Step."""
        passes()

    def commit(self) -> None:
        """End the block."""
        raise _Rehearsed("rehearsed")


class Rehearsal:
    """Of a process that its configuration says so of. Used by the training thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._left = job.config.rehearse
        self.under_way = False

    def begins(self) -> bool:
        """Whether the loop is to make the step now: once."""
        self.under_way, self._left = self._left, False
        return self.under_way

    @contextmanager
    def step(self) -> Iterator[Step]:
        """The first step, as the last rank would compute it. Errors of the script end it too, and
        are in the log: the real step will show them, if it has them.
        """
        job, error, started = self._job, "", time.monotonic()
        kept = HostCopy([*replay.besides(job.state).values()], apart=True)
        kept.wait(COPY_S)
        scalars, before = job.state.scalars(), fingerprint(job.state)
        job.rank, job.world = job.config.world - 1, job.config.world
        number, probe, job.probe = job.state.step + 1, job.probe, None
        step = _RehearsedStep(job, number, job.micro_batches(number))
        job.progress.begin(step)
        try:
            job.state.seed_step(job.arranged.draws(job.rank), number)
            with in_step(step.backward_mean if job.wrapped else None):
                yield step
        except _Rehearsed:
            pass
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        finally:
            self.under_way = False
            job.progress.forget()
            job.rank, job.world, job.probe = -1, 0, probe
            job.reducer.rehearse()
        for tensor, view in zip(replay.besides(job.state).values(), kept.views, strict=True):
            replay.put(tensor, view)
        if job.state.scalars() != scalars:
            job.state.load_scalars(scalars)
        if fingerprint(job.state) != before:
            job.member.holding.fresh = False
            error = error or "the script has changed the state before step.commit()"
        seconds = round(time.monotonic() - started, 6)
        job.write(Kind.SPARE_REHEARSED, step=number, seconds=seconds, error=error)
