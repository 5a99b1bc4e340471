"""A data loader with workers that delivers exactly the samples a step asks for.

The workers are torchdata's StatefulDataLoader's. They compute what this rank will need if nothing happens: the coming
steps' micro-batches, which are a pure function of the step, the rank, the number of ranks and the samples left out. If
something does happen, what they have computed ahead may be stale. Nobody has to notice that: each batch carries the
step and the ids it was made for, and one that is not what was asked for is thrown away, with all that follow it.

Random numbers of a dataset are seeded from (seed, step, sample), so they do not depend on who computes a sample.

Workers are forked before the process has any connection to other ranks, and end with it, whatever ends it: the kernel
sees to that. SIGTERM, which is a notice to a rank, ends a worker.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from recovery import processes
from recovery.order import MicroBatch

if TYPE_CHECKING:
    from torchdata.stateful_dataloader import StatefulDataLoader

LIMIT_S = 300.0
Key = tuple[int, int]
"""Step and sample."""
Collate = Callable[[list[Any]], Any]


class Plan(Protocol):
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
        """What this rank computes of a step. Raises RuntimeError when nothing of it is left."""

    def check(self) -> None:
        """Raise GenerationLost if this generation is over."""


class Loader:
    """See ``Job.loader``. Used by the training thread."""

    def __init__(
        self, plan: Plan, dataset: Dataset[Any], *, num_workers: int, collate_fn: Collate | None, prefetch: int,
        limit_s: float = LIMIT_S,
    ) -> None:  # fmt: skip
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(
                "a step names its samples, and an iterable dataset cannot be asked for one: job.loader needs "
                "a dataset with __getitem__"
            )
        self._plan = plan
        self._dataset = _Keyed(dataset, plan.seed)
        self._collate = collate_fn or default_collate
        self._sampler = StepSampler(plan)
        self._batches: Iterator[tuple[list[Key], Any]] | None = None
        self.workers: Sequence[Any] = ()
        self.stateful: StatefulDataLoader[Any] | None = None
        if num_workers:
            self._start(num_workers, prefetch, limit_s)

    def load(self, samples: Sequence[int]) -> Any:
        """What ``collate_fn`` makes of these samples, of ``step.samples`` or one of ``step.batches()``.

        From the workers where they are this rank's in the next step; others are computed here. Raises RuntimeError when
        a worker was lost or nothing came within the limit, GenerationLost, and whatever the dataset raises.
        """
        self._plan.check()
        number = self._plan.done + 1
        keys = [(number, sample) for sample in samples]
        place = self._place(number, samples)
        if self.stateful is None or place is None:
            with _generators_kept():
                return self._collate([self._dataset[key][1] for key in keys])
        for worker in self.workers:
            if not worker.is_alive():
                raise RuntimeError(f"data loader worker {worker.pid} ended with exit code {worker.exitcode}")
        made, batch = self._next(number, place)
        if made != keys:
            self._batches = None  # made for another share of the batch, or a step that is done again
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
            following = next(self._batches, None)
            if following is not None:
                return following
        assert self.stateful is not None
        self._sampler.start = (number, place)
        self._batches = iter(self.stateful)
        return next(self._batches)

    def _start(self, num_workers: int, prefetch: int, limit_s: float) -> None:
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader
        except ImportError as error:
            raise ImportError(
                f"job.loader(num_workers={num_workers}) needs torchdata: install the extra 'data' "
                "(pip install 'trainchaos[data]'), or use num_workers=0"
            ) from error
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
        before = multiprocessing.active_children()
        self.stateful = StatefulDataLoader(
            self._dataset, batch_sampler=self._sampler, num_workers=num_workers,
            collate_fn=partial(_with_keys, self._collate), prefetch_factor=prefetch, persistent_workers=True,
            multiprocessing_context=multiprocessing.get_context("fork"), timeout=limit_s,
            worker_init_fn=partial(_belong_to, os.getpid()),
            generator=torch.Generator(),  # else it draws its seed from the generator that training uses
        )  # fmt: skip
        iter(self.stateful)  # forks them; there is nothing to load yet
        self.workers = [child for child in multiprocessing.active_children() if child not in before]


class StepSampler(Sampler[list[Key]]):
    """What a rank is to load from ``start`` on: step and place among its micro-batches. A pure function of that and of
    the plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.start = (plan.done + 1, 0)

    def __iter__(self) -> Iterator[list[Key]]:
        return _Positions(self._plan, *self.start)


class _Positions(Iterator[list[Key]]):
    """Its state is where it is."""

    def __init__(self, plan: Plan, step: int, place: int) -> None:
        self._plan = plan
        self._step = step
        self._place = place

    def __next__(self) -> list[Key]:
        while self._plan.world and self._step <= self._plan.steps:
            try:
                micros = self._plan.micro_batches(self._step)
            except RuntimeError:
                break  # nothing of that step is left; the step itself says so when it comes
            if self._place < len(micros):
                self._place += 1
                return [(self._step, sample) for sample in micros[self._place - 1].samples]
            self._step, self._place = self._step + 1, 0
        raise StopIteration

    def state_dict(self) -> dict[str, int]:
        """For StatefulDataLoader."""
        return {"step": self._step, "place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Put back what ``state_dict`` returned."""
        self._step, self._place = state["step"], state["place"]


class _Keyed(Dataset[tuple[Key, Any]]):
    """Samples by step and id, each with its own random numbers."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: Key) -> tuple[Key, Any]:
        digest = hashlib.blake2b(f"{self._seed}/{key[0]}/sample {key[1]}".encode(), digest_size=8).digest()
        value = int.from_bytes(digest, "big") >> 1
        torch.manual_seed(value)
        random.seed(value)
        numpy.random.seed(value & 0xFFFFFFFF)
        return key, self._dataset[key[1]]


def _with_keys(collate: Collate, items: list[tuple[Key, Any]]) -> tuple[list[Key], Any]:
    return [key for key, _ in items], collate([item for _, item in items])


def _belong_to(parent: int, _: int) -> None:
    processes.die_with(parent)


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Random generators are afterwards as they were before."""
    states = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(states[0])
            numpy.random.set_state(states[1])
