"""One attempt at one training step, and whoever is told where in it training is."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from recovery import marks
from recovery.mechanisms.reduce import Reduced

if TYPE_CHECKING:
    from recovery.job import Job


class Probe(Protocol):
    """Told where training is; a fault injector lives here. Every call is on the training thread."""

    active: bool

    def at(self, step: int, phase: str) -> None:
        """The rank is in this phase of this step."""

    def ended(self, phase: str, seconds: float) -> None:
        """The phase took this long."""

    def committed(self, step: int) -> None:
        """The step is committed."""


class NonFinite(Exception):
    """A loss or gradient that must not be applied. ``blamed``: ranks whose own values were not finite."""

    def __init__(self, blamed: tuple[int, ...]) -> None:
        super().__init__(f"non-finite values from ranks {list(blamed)}")
        self.blamed = blamed


class Step:
    """One attempt at one step. ``samples``: ids of this rank's share of the global batch.

    ``count``: how many of them count; 0 for one that has no share and computes a sample only to take part.
    """

    def __init__(self, job: Job, number: int, samples: list[int], *, count: int) -> None:
        self.number = number
        self.samples = samples
        self.count = count
        self.change_loss: Callable[[Tensor], Tensor] | None = None
        self._job = job
        self._phase = "data"
        self._since = time.perf_counter()
        self._reduced: Reduced | None = None
        self.seconds: dict[str, float] = {}

    @property
    def in_data(self) -> bool:
        """Whether no other phase has begun yet."""
        return self._phase == "data"

    def end_phase(self) -> None:
        """Close the account of the last phase."""
        self.seconds[self._phase] = time.perf_counter() - self._since

    def phase(self, name: str) -> None:
        """Note that the next phase begins (data, forward, backward, collective, optimizer)."""
        job = self._job
        job.check()
        now = time.perf_counter()
        probe = job.probe
        if probe is not None and probe.active:
            probe.ended(self._phase, now - self._since)
            now_after = time.perf_counter()
        else:
            now_after = now
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now_after - self._since
        self._phase = name
        self._since = now_after
        job.marks.enter(marks.PHASES.index(name))
        if probe is not None and probe.active and name != "backward":
            probe.at(self.number, name)

    def backward(self, loss: Tensor) -> None:
        """Back-propagate the summed loss of this rank's samples and reduce gradients over the ranks.

        Raises RuntimeError the second time: a step has one reduction.
        """
        if self._reduced is not None:
            raise RuntimeError("step.backward() was called twice in one step: sum the losses first")
        job = self._job
        if self.change_loss is not None:
            loss = self.change_loss(loss)
        if job.spoil is not None:
            loss = job.spoil(self.samples, loss)
        if not self.count:
            loss = loss * 0.0
        value = float(loss.detach())
        self.phase("backward")
        loss.backward()
        self.phase("collective")
        self._reduced = job.reducer.finish(
            rank=job.rank,
            loss_sum=value,
            count=self.count,
            pause=job.agent.pause_wanted,
            save=job.agent.save_wanted,
        )

    def require_commit(self) -> None:
        """Raise RuntimeError unless this step is committed: the other ranks have gone on."""
        if self._job.state.step < self.number:
            raise RuntimeError(f"step {self.number} ended without step.commit(): every step needs it")

    def commit(self) -> None:
        """Apply the gradients. On all ranks alike, a non-finite loss or gradient is refused before it
        touches anything. Raises RuntimeError before ``backward``, and the second time.
        """
        if self._job.state.step >= self.number:
            raise RuntimeError(f"step {self.number} was committed already: step.commit() once in each step")
        self.phase("optimizer")
        reduced = self._reduced
        if reduced is None:
            raise RuntimeError("commit() before backward()")
        if not reduced.finite:
            raise NonFinite(reduced.blamed)
        self._job.apply(self, reduced)
