"""What a training script may ask of its job besides steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from chaos.events.log import Kind
from recovery.collectives.group import GenerationLost
from recovery.data.loader import LIMIT_S as LOADER_LIMIT_S
from recovery.data.loader import Loader
from recovery.data.order import Batch, MicroBatch
from recovery.policy.jobconfig import JobConfig
from recovery.rank.busy import LIMIT_S, Busy
from recovery.rank.membership import Membership
from recovery.state.registered import Stateful
from recovery.state.state import TrainState
from recovery.transport.progress_counters import MarkPage


class JobFacts(ABC):
    """Base of ``recovery.rank.job.Job``. ``rank``, -1 in a spare, and ``world`` may change from
    step to step.
    """

    config: JobConfig
    state: TrainState
    marks: MarkPage
    member: Membership
    rank = -1
    world = 0
    _busy: Busy | None = None

    def busy(self, what: str, *, limit_s: float = LIMIT_S) -> Busy:
        """Say that this rank does something else, such as an evaluation, while others may wait for
        it: it is not taken for hung within ``limit_s`` seconds (an hour).

        ``with job.busy("evaluation"):`` around it; or a call before it, which holds until the next
        phase of a step. Its ``wanted`` says whether another rank has failed meanwhile and the job
        waits. The event log says what it was and how long it took (``busy``, ``busy_ended``).
        Raises ValueError.
        """
        outer = self._inside()
        busy = Busy(
            what,
            limit_s,
            note=self.marks.busy,
            wanted=self._lost,
            outer=outer,
            ended=self._busy_ended,
        )
        if self._busy is not None and self._busy is not outer:
            self._busy.end()  # a call without a block holds until the next
        self._busy = busy
        self._write(Kind.BUSY, rank=self._own_rank, what=busy.what, limit_s=busy.limit_s)
        return busy

    def _busy_ended(self, busy: Busy, seconds: float) -> None:
        self._write(Kind.BUSY_ENDED, rank=self._own_rank, what=busy.what, seconds=round(seconds, 6))

    @property
    def _own_rank(self) -> int | None:
        return self.rank if self.rank >= 0 else None

    def _inside(self) -> Busy | None:
        """In which block of ``busy`` the script is, if in any."""
        busy = self._busy
        while busy is not None and not busy.inside:
            busy = busy.outer
        return busy

    def not_busy(self) -> None:
        """Training goes on: what ``busy`` said without a ``with`` does not hold any more."""
        if self._busy is not None and self._inside() is None:
            self._busy.end()
            self._busy = None
            self.marks.busy(0)

    def _lost(self) -> bool:
        """Whether this generation is over."""
        try:
            self.check()
        except GenerationLost:
            return True
        return False

    @property
    def generation(self) -> int:
        """Number of the group of ranks that it trains in, or did last; 0 before the first."""
        return self.member.generation

    @property
    def seed(self) -> int:
        """Of the job: seed whatever must be alike on all ranks, such as the model's initial values,
        with it.
        """
        return self.config.seed

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole job."""
        return self.config.steps

    @property
    def device(self) -> str:
        """Where this process is to train: ``cpu`` or ``cuda:<index>``."""
        return self.config.device

    @property
    def done(self) -> int:
        """The last step that is applied here."""
        return self.state.step

    def due(self, number: int) -> list[int]:
        """The global batch of a step, without the samples that the job leaves out."""
        return list(self._batch(number))

    def _batch(self, number: int) -> Batch:
        config = self.config
        return Batch(number, config.global_batch, config.samples, config.seed, self.state.skip)

    @abstractmethod
    def micro_batches(self, number: int) -> list[MicroBatch]:
        """What this rank computes of a step. Raises RuntimeError when nothing of it is left."""

    @abstractmethod
    def check(self) -> None:
        """Raise GenerationLost if the supervisor aborted this generation."""

    @abstractmethod
    def _write(self, kind: Kind, /, **data: Any) -> None:
        """Log an event."""

    def register(
        self, name: str, thing: Stateful, *, update: Callable[[], None] | None = None
    ) -> None:
        """Make an object's state part of the job's: it is saved, restored and copied with the
        model. Between ``attach`` and the loop, the same on every rank.

        ``thing`` has ``state_dict`` and ``load_state_dict``; its tensors are its own, all else is
        JSON. ``update`` is called after each optimizer step, before anything is saved:
        ``update=lambda: ema.update_parameters(model)``. What changes it elsewhere belongs before
        ``step.commit()``. Raises TypeError, ValueError for a name that is taken, RuntimeError
        before ``attach``.
        """
        if not hasattr(self, "state"):
            raise RuntimeError(
                "job.attach(model, optimizer) comes before job.register(name, object)"
            )
        self.state.registered.add(name, thing, update)

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        num_workers: int = 2,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 2,
        limit_s: float = LOADER_LIMIT_S,
    ) -> Loader:
        """A data loader whose workers compute this rank's samples ahead: ``loader.load(samples)``
        in a step. Make it after ``attach`` and before the loop.

        ``prefetch``: batches each worker computes ahead; ``collate_fn``: default torch's. With 0
        workers samples are computed when they are asked for. ``limit_s``: how long data may take to
        come; a rank that waits for its workers is not taken for hung until then. Raises ImportError
        when torchdata is not installed, TypeError for an iterable dataset, RuntimeError before
        ``attach``.
        """
        if not hasattr(self, "state"):
            raise RuntimeError("job.attach(model, optimizer) comes before job.loader(dataset)")
        return Loader(
            self,
            dataset,
            num_workers=num_workers,
            collate_fn=collate_fn,
            prefetch=prefetch,
            limit_s=limit_s,
        )
