"""A data loader with workers that delivers exactly the samples a step asks for.

The workers are those of torch's DataLoader. They compute what this rank will need if no failure
happens: the coming steps' micro-batches, which are a pure function of the step, the rank,
the number of ranks and the samples left out. After a failure, batches computed ahead may be stale.
They need no invalidation: each batch carries the step and the ids it was made for, and one that
does not match the request is thrown away, with all that follow it.

Random numbers of a dataset are seeded from (seed, step, sample), so they do not depend on the rank
that computes a sample.

Workers are forked before the process has any connection to other ranks, and the kernel ends them
with it in every case. SIGTERM, which is a notice to a rank, ends a worker.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from trainchaos.recovery.data.order import MicroBatch
from trainchaos.recovery.process import processes

LIMIT_S = 300.0
LOOK_S = 0.1
"""How often a rank that waits for its workers checks whether its generation is over."""
Key = tuple[int, int]
"""Step and sample."""
Collate = Callable[[list[Any]], Any]


class LoaderJob(Protocol):
    """What a loader needs to know of a job. ``world``: 0 before there is a rank."""

    world: int

    @property
    def done(self) -> int:
        """The last step applied."""

    @property
    def steps(self) -> int:
        """Of the whole job."""

    @property
    def seed(self) -> int:
        """Of the job."""

    def micro_batches(self, number: int) -> list[MicroBatch]:
        """The micro-batches of a step that this rank computes. Raises RuntimeError when none is
        left.
        """

    def check(self) -> None:
        """Raise GenerationLost if this generation is over."""

    def busy(self, what: str, *, limit_s: float) -> AbstractContextManager[Any]:
        """Report that this rank waits, for so many seconds at most."""


class Loader:
    """See ``Job.loader``. Used by the training thread."""

    def __init__(
        self,
        plan: LoaderJob,
        dataset: Dataset[Any],
        *,
        num_workers: int,
        collate_fn: Collate | None,
        prefetch: int,
        limit_s: float = LIMIT_S,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                "a step names its samples, and an iterable dataset cannot be asked for one:"
                " job.loader needs a dataset with __getitem__"
            )
        self._plan = plan
        self._dataset = _Keyed(dataset, plan.seed)
        self._collate = collate_fn or default_collate
        self._sampler = _StepSampler(plan)
        self._batches: Any = None  # an iterator over (keys, batch)
        self._restarting: Future[Any] | None = None
        self._limit_s = limit_s
        self.workers: Sequence[Any] = ()
        self._ahead: DataLoader[Any] | None = None
        if num_workers:
            self._start(num_workers, prefetch, limit_s)

    def load(self, samples: Sequence[int]) -> Any:
        """The result of ``collate_fn`` for these samples, of ``step.samples`` or one of
        ``step.batches()``.

        It comes from the workers where the samples are this rank's in the next step; others are
        computed here. While the rank waits for a worker it reports that it is busy, and it leaves
        when its generation is aborted. Raises RuntimeError when a worker was lost or nothing came
        within the limit, GenerationLost, and whatever the dataset raises.
        """
        self._plan.check()
        number = self._plan.done + 1
        keys = [(number, sample) for sample in samples]
        place = self._place(number, samples)
        if self._ahead is None or place is None:
            with _generators_kept():
                return self._collate([self._dataset[key][1] for key in keys])
        self._refuse_lost_workers()
        made, batch = self._next(number, place)
        if made != keys:
            # made for another share of the batch, or a step that is done again
            self._batches = None
            made, batch = self._next(number, place)
        if made != keys:
            raise RuntimeError(f"the data loader delivers {made} where {keys} were asked for")
        return batch

    def _place(self, number: int, samples: Sequence[int]) -> int | None:
        if number > self._plan.steps or self._plan.world < 1:
            return None
        planned = [micro.samples for micro in self._plan.micro_batches(number)]
        wanted = list(samples)
        return planned.index(wanted) if wanted in planned else None

    def _next(self, number: int, place: int) -> tuple[list[Key], Any]:
        if self._batches is not None:
            following = self._awaited()
            if following is not None:
                return following
        self._restart(number, place)
        following = self._awaited()
        if following is None:
            raise RuntimeError(f"the data loader has nothing for step {number}")
        return following

    def _awaited(self) -> tuple[list[Key], Any] | None:
        """The next batch, None after the last. Workers may take as long as the limit allows."""
        try:
            found: tuple[list[Key], Any] | None = next(self._batches, None)
            return found
        except RuntimeError as error:
            if not _took_long(error):
                raise
        deadline_s = time.monotonic() + self._limit_s
        with self._plan.busy("data", limit_s=self._limit_s + 1):
            while True:
                self._plan.check()
                self._refuse_lost_workers()
                try:
                    found = next(self._batches, None)
                    return found
                except RuntimeError as error:
                    if not _took_long(error) or time.monotonic() > deadline_s:
                        raise

    def _restart(self, number: int, place: int) -> None:
        """Have the workers begin anew. They first finish their current batch, which may take long:
        a thread waits for that, so that this one can leave.
        """
        before, self._batches = self._restarting, None
        with self._plan.busy("data", limit_s=self._limit_s + 1):
            if before is not None:
                self._until_done(before)
            self._sampler.start = (number, place)
            made = self._restarting = Future[Any]()
            threading.Thread(
                target=self._begin_anew, args=(made,), name="restart-data", daemon=True
            ).start()
            self._until_done(made)
        self._batches, self._restarting = made.result(), None

    def _until_done(self, made: Future[Any]) -> None:
        while not wait([made], timeout=LOOK_S / 4).done:
            self._plan.check()

    def _begin_anew(self, made: Future[Any]) -> None:
        try:
            assert self._ahead is not None
            self._patience(self._limit_s)
            batches = iter(self._ahead)
            self._patience(LOOK_S)
            made.set_result(batches)
        except BaseException as error:
            made.set_exception(error)

    def _patience(self, seconds: float) -> None:
        """Limit of torch's own wait for a worker. Nothing is lost after it: a late batch comes
        next.
        """
        iterator = getattr(self._ahead, "_iterator", None)
        if iterator is not None:
            iterator._timeout = seconds

    def _refuse_lost_workers(self) -> None:
        for worker in self.workers:
            if not worker.is_alive():
                raise RuntimeError(
                    f"data loader worker {worker.pid} ended with exit code {worker.exitcode}"
                )

    def _start(self, num_workers: int, prefetch: int, limit_s: float) -> None:
        before = multiprocessing.active_children()
        self._ahead = DataLoader(
            self._dataset,
            batch_sampler=self._sampler,
            num_workers=num_workers,
            collate_fn=partial(_with_keys, self._collate),
            prefetch_factor=prefetch,
            persistent_workers=True,
            multiprocessing_context=multiprocessing.get_context("fork"),
            timeout=limit_s,
            worker_init_fn=partial(_belong_to, os.getpid()),
            # else it draws its seed from the generator that training uses
            generator=torch.Generator(),
        )
        iter(self._ahead)  # forks the workers; there is nothing to load yet
        self.workers = [child for child in multiprocessing.active_children() if child not in before]


class _StepSampler(Sampler[list[Key]]):
    """The (step, sample) pairs of each micro-batch that a rank loads from ``start``, a step and a
    place among its micro-batches, on. A pure function of that and of the plan.
    """

    def __init__(self, plan: LoaderJob) -> None:
        self._plan = plan
        self.start = (plan.done + 1, 0)

    def __iter__(self) -> Iterator[list[Key]]:
        plan, (first, place) = self._plan, self.start
        for step in range(first, plan.steps + 1) if plan.world else ():
            try:
                micros = plan.micro_batches(step)
            except RuntimeError:
                return  # nothing of that step is left; the step itself says so when it comes
            for micro in micros[place if step == first else 0 :]:
                yield [(step, sample) for sample in micro.samples]


class _Keyed(Dataset[tuple[Key, Any]]):
    """Samples by step and id, each with its own random numbers."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: Key) -> tuple[Key, Any]:
        digest = hashlib.blake2b(
            f"{self._seed}/{key[0]}/sample {key[1]}".encode(), digest_size=8
        ).digest()
        value = int.from_bytes(digest, "big") >> 1
        torch.manual_seed(value)
        random.seed(value)
        numpy.random.seed(value & 0xFFFFFFFF)
        return key, self._dataset[key[1]]


def _took_long(error: RuntimeError) -> bool:
    return "timed out" in str(error)


def _with_keys(collate: Collate, items: list[tuple[Key, Any]]) -> tuple[list[Key], Any]:
    return [key for key, _ in items], collate([item for _, item in items])


def _belong_to(parent: int, _: int) -> None:
    processes.die_with(parent)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore random generators afterwards."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
