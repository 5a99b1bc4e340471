"""A step that a spare trains alone before it is ready, and that counts for nothing: what a first
step takes longer for than any other is behind it when it takes a place. Kernels are loaded or
compiled, memory is allocated, workers of a data loader have started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.rank.recipe import Attached
from trainchaos.recovery.rank.step import JobContext, Step
from trainchaos.recovery.state.fingerprint import fingerprint
from trainchaos.recovery.state.misuse import backward_as_torch_does, in_step


class _Rehearsed(GenerationLost):
    """The step goes no further; the loop sees what it sees when a step is broken off."""


class _RehearsedStep(Step):
    """A step without other ranks: nothing is reduced, and nothing is applied."""

    def phase(self, name: str) -> None:
        """Nobody is told; other work that the script has announced is over, as ever."""
        self._job.blocks.training()
        self._phase = name

    def check_pass(self) -> None:
        """No generation can be lost."""

    def accumulate(self, loss: Tensor) -> None:
        backward_as_torch_does(loss)

    def backward(self, loss: Tensor) -> None:
        backward_as_torch_does(loss)
        self._kept += 1

    def run(self, passes: Callable[[], Tensor]) -> None:
        passes()

    def commit(self) -> None:
        """End the block."""
        raise _Rehearsed("rehearsed")


class Rehearsal:
    """The rehearsal of a process whose configuration asks for one. Used by the training thread.

    ``under_way``: the loop is in the step, or in what the script does before and after it.
    """

    def __init__(self, job: JobContext, attached: Attached) -> None:
        self._job, self._attached = job, attached
        self._left = job.config.rehearse
        self.under_way = False

    def begins(self) -> bool:
        """Whether the loop is to make the step now: once, before the process is ready. Called each
        time that the loop comes round until then.
        """
        if self.under_way:
            self._end()
        begins, self._left = self._left, False
        if begins:
            self._begin()
        return begins

    @contextmanager
    def step(self) -> Iterator[Step]:
        """The first step, as the last rank would compute it. Errors of the script end it too, and
        are in the log: the real step will show them, if it has them.
        """
        job, number = self._job, self._job.state.step + 1
        step = _RehearsedStep(job, number, job.micro_batches(number))
        job.progress.begin(step)
        try:
            job.state.seed_step(job.arranged.draws(job.rank), number)
            with in_step(step.backward_mean if self._attached.wrapped else None):
                yield step
        except _Rehearsed:
            pass
        except Exception as raised:
            self._error = f"{type(raised).__name__}: {raised}"
        finally:
            job.blocks.training()
            job.progress.forget()

    def _begin(self) -> None:
        job, self._started, self._error = self._job, time.monotonic(), ""
        self._attached.rehearse()
        job.state.attempt.begin()
        self._scalars, self._print = job.state.scalars(), fingerprint(job.state)
        self._probe, job.probe = job.probe, None
        job.rank, job.world, self.under_way = job.config.world - 1, job.config.world, True
        if self._attached.groups is not None:
            self._attached.groups.away(True)

    def _end(self) -> None:
        job, number = self._job, self._job.state.step + 1
        if self._attached.groups is not None:
            self._attached.groups.away(False)
        job.rank, job.world, job.probe, self.under_way = -1, 0, self._probe, False
        job.reducer.rehearse()
        try:
            self._put_back()
        except Exception as raised:
            self._error = self._error or f"{type(raised).__name__}: {raised}"
            job.member.holding.fresh = False
        seconds = round(time.monotonic() - self._started, 6)
        job.write(Kind.SPARE_REHEARSED, step=number, seconds=seconds, error=self._error)

    def _put_back(self) -> None:
        """Raises ValueError where the state is not what it was: the process gets another then."""
        state = self._job.state
        whole = state.attempt.whole()
        state.attempt.undo()
        if state.scalars() != self._scalars:
            state.load_scalars(self._scalars)
        if not whole or fingerprint(state) != self._print:
            raise ValueError("the script has changed the state before step.commit()")
