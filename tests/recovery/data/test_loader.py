"""A data loader with workers delivers exactly what a step asks for, whatever happened since it was
computed.
"""

from __future__ import annotations

import os
import queue
import random
import select
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from tests.support.running import LIMIT_S, readable
from trainchaos.recovery.collectives.group import GenerationLost
from trainchaos.recovery.data import order
from trainchaos.recovery.data.loader import Loader
from trainchaos.recovery.data.order import MicroBatch
from trainchaos.recovery.process import processes

pytestmark = pytest.mark.real  # workers are processes
SAMPLES, BATCH, STEPS, SEED = 40, 8, 12, 3


class Job:
    """What a loader asks of a job; the test moves it."""

    def __init__(self, *, rank: int = 0, world: int = 2, elastic: bool = False) -> None:
        self.rank, self.world, self.elastic = rank, world, elastic
        self.done, self.steps, self.seed = 0, STEPS, SEED
        self.skip: dict[int, int] = {}
        self.lost = False
        self.waits: queue.SimpleQueue[str] = queue.SimpleQueue()

    def micro_batches(self, number: int) -> list[MicroBatch]:
        ids = order.without(order.batch(number, BATCH, SAMPLES, SEED), number, self.skip)
        if not ids:
            raise RuntimeError("nothing is left")
        return order.micro_batches(
            ids, rank=self.rank, world=self.world, full=4, elastic=self.elastic
        )

    def check(self) -> None:
        if self.lost:
            raise GenerationLost("aborted")

    @contextmanager
    def busy(self, what: str, *, limit_s: float) -> Iterator[None]:
        self.waits.put(f"{what} {limit_s:g}")
        try:
            yield
        finally:
            self.waits.put("")

    def step(self, loader: Loader) -> list[list[int]]:
        """One step: what was loaded is what was asked for."""
        got = []
        for micro in self.micro_batches(self.done + 1):
            batch = loader.load(micro.samples)
            assert batch["id"].tolist() == micro.samples, f"step {self.done + 1}"
            got.append((micro.samples, batch["noise"].tolist()))
        self.done += 1
        return got


class Numbers(Dataset[Any]):
    """Each sample is its own index, and random numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < 0:
            raise IndexError(index)
        noise = float(torch.rand(())) + random.random() + float(numpy.random.rand())
        return {"id": index, "noise": noise, "pid": os.getpid()}


@pytest.fixture
def job() -> Job:
    return Job()


def loader_of(job: Job, *, workers: int = 2, **more: Any) -> Loader:
    found = Loader(
        job,
        more.pop("dataset", Numbers()),
        num_workers=workers,
        collate_fn=None,
        prefetch=2,
        limit_s=LIMIT_S,
        **more,
    )
    return found


@pytest.fixture
def loader(job: Job) -> Iterator[Loader]:
    yield loader_of(job)


def reference(**about: Any) -> list[Any]:
    """What a job nothing happens to loads, step by step."""
    job = Job(**about)
    loader = loader_of(job, workers=0)
    return [job.step(loader) for _ in range(STEPS)]


def test_it_delivers_every_step_from_its_workers(job: Job, loader: Loader) -> None:
    expected = reference()
    assert [job.step(loader) for _ in range(STEPS)] == expected
    noise = [value for step in expected for _, values in step for value in values]
    assert len(set(noise)) == len(noise) > SAMPLES, (
        "a sample has other random numbers in another epoch"
    )
    job.done = 0
    pids = set(loader.load(job.micro_batches(1)[0].samples)["pid"].tolist())
    assert pids <= {worker.pid for worker in loader.workers} and os.getpid() not in pids


def test_a_step_that_is_done_again_is_loaded_again(job: Job, loader: Loader) -> None:
    expected = reference()
    for _ in range(4):
        job.step(loader)
    for back in (1, 3):
        job.done -= back
        for number in range(job.done, job.done + back + 2):
            assert job.step(loader) == expected[number]


def test_a_step_given_up_half_way_is_begun_anew() -> None:
    job = Job(world=1, elastic=True)
    loader, expected = loader_of(job), reference(world=1, elastic=True)
    job.step(loader)
    for micro in job.micro_batches(2)[:3]:
        loader.load(micro.samples)
    assert [job.step(loader) for _ in range(2)] == expected[1:3]


@pytest.mark.parametrize("elastic", [False, True])
def test_another_share_after_ranks_were_lost_or_came_back(elastic: bool) -> None:
    job = Job(world=4, elastic=elastic)
    loader = loader_of(job)
    seen = []
    for rank, world in ((0, 4), (0, 3), (2, 3), (1, 4), (0, 1), (3, 4)):
        job.rank, job.world = rank, world
        for _ in range(2):
            seen.append(job.step(loader))
            expected = reference(rank=rank, world=world, elastic=elastic)[job.done - 1]
            assert seen[-1] == expected
    assert len(seen) == STEPS


def test_a_sample_left_out_from_now_on_is_not_delivered(job: Job, loader: Loader) -> None:
    job.step(loader)
    out = order.batch(2, BATCH, SAMPLES, SEED)[:2]
    job.skip = dict.fromkeys(out, 2)
    got = [job.step(loader) for _ in range(5)]
    assert not {sample for step in got for samples, _ in step for sample in samples} & set(out)
    job.skip = dict.fromkeys(range(SAMPLES), job.done + 2)
    job.step(loader)
    with pytest.raises(RuntimeError, match="nothing is left"):
        job.step(loader)


def test_a_checkpoint_of_long_ago(job: Job, loader: Loader) -> None:
    expected = reference()
    job.done = 9
    assert job.step(loader) == expected[9]
    job.done = 2
    assert [job.step(loader) for _ in range(10)] == expected[2:]


def test_a_spare_has_its_workers_before_it_has_a_rank() -> None:
    job = Job(rank=-1, world=0)
    loader = loader_of(job)
    assert len(loader.workers) == 2 and all(worker.is_alive() for worker in loader.workers)
    job.rank, job.world, job.done = 1, 2, 5
    assert job.step(loader) == reference(rank=1)[5]


def test_the_training_process_keeps_its_random_numbers(job: Job) -> None:
    def drawn() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    def seeded() -> None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)

    seeded()
    expected = drawn()
    seeded()
    loader = loader_of(job)
    job.step(loader)
    job.done = 0
    job.step(loader)  # the workers begin anew
    loader.load([5, 1])  # here
    assert drawn() == expected


def test_samples_of_nobodys_plan_are_computed_here(loader: Loader) -> None:
    batch = loader.load([7, 3])
    assert batch["id"].tolist() == [7, 3]
    assert set(batch["pid"].tolist()) == {os.getpid()}


def test_an_aborted_generation_is_noticed(job: Job, loader: Loader) -> None:
    job.lost = True
    with pytest.raises(GenerationLost):
        job.step(loader)


class Late(Numbers):
    """Data that come when the test says so."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def __getitem__(self, index: int) -> dict[str, Any]:
        readable(self.reader)
        return super().__getitem__(index)

    def come(self) -> None:
        """All of them from now on."""
        os.write(self.writer, b"x")


def late_loader(job: Job) -> tuple[Loader, Late]:
    """Of a process that has no rank yet: its workers have nothing to do."""
    world, job.world, data = job.world, 0, Late()
    loader = loader_of(job, dataset=data)
    job.world = world
    return loader, data


def begun(job: Job, loader: Loader) -> Future[Any]:
    """Load a step on a thread, until it says that it waits for a worker."""
    made: Future[Any] = Future()

    def load() -> None:
        try:
            made.set_result(job.step(loader))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=load, daemon=True).start()
    said = [job.waits.get(timeout=LIMIT_S) for _ in range(3)]
    assert said == [f"data {LIMIT_S + 1:g}", "", f"data {LIMIT_S + 1:g}"], (
        "it restarts, and then waits"
    )
    return made


def test_a_rank_that_waits_for_its_workers_says_so_and_gets_what_it_waits_for(job: Job) -> None:
    loader, data = late_loader(job)
    made = begun(job, loader)
    data.come()
    assert made.result(timeout=LIMIT_S) == reference()[0]
    assert job.waits.get(timeout=LIMIT_S) == ""


def test_a_rank_that_waits_for_its_workers_leaves_an_aborted_generation_and_loads_the_step_again(
    job: Job,
) -> None:
    loader, data = late_loader(job)
    made = begun(job, loader)
    job.lost = True
    with pytest.raises(GenerationLost):
        made.result(timeout=LIMIT_S)
    assert job.waits.get(timeout=LIMIT_S) == ""
    job.lost, job.rank = (
        False,
        1,
    )  # another share: the workers begin anew, when they are done with what they are at
    made = Future()
    threading.Thread(target=lambda: made.set_exception(_raised(job, loader)), daemon=True).start()
    assert job.waits.get(timeout=LIMIT_S).startswith("data")
    job.lost = True
    assert isinstance(made.exception(timeout=LIMIT_S), GenerationLost), "in the midst of that too"
    job.lost = False
    data.come()
    assert job.step(loader) == reference(rank=1)[0]


def _raised(job: Job, loader: Loader) -> BaseException:
    try:
        job.step(loader)
    except GenerationLost as error:
        return error
    return AssertionError("it was loaded")


def test_a_killed_worker_is_an_error(job: Job, loader: Loader) -> None:
    job.step(loader)
    worker = loader.workers[1]
    with pytest.raises(RuntimeError, match=f"worker .pid {worker.pid}. is killed by signal"):
        os.kill(worker.pid, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            # torch raises in the midst of whatever the main thread does
            select.select([], [], [], 0.05)
    with pytest.raises(RuntimeError, match=f"worker {worker.pid} ended with exit code -9"):
        job.step(loader)  # if that error was lost


def test_an_error_of_the_data_set_comes_through(job: Job) -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise ValueError(f"sample {index} cannot be read")

    loader = loader_of(job, dataset=Broken())
    with pytest.raises(ValueError, match="cannot be read"):
        job.step(loader)


@pytest.mark.long
def test_a_worker_that_hangs_is_an_error_in_the_end(job: Job) -> None:
    reader, writer = os.pipe()

    class Stuck(Numbers):
        def __getitem__(self, index: int) -> dict[str, Any]:
            readable(reader)
            return super().__getitem__(index)

    loader = Loader(job, Stuck(), num_workers=1, collate_fn=None, prefetch=1, limit_s=0.5)
    with pytest.raises(RuntimeError, match="timed out"):
        job.step(loader)
    os.write(writer, b"x")


def test_workers_end_with_their_rank() -> None:
    out, into = os.pipe()
    processes.become_subreaper()
    pid = os.fork()
    if not pid:
        try:
            loader = loader_of(Job())
            os.write(into, " ".join(str(worker.pid) for worker in loader.workers).encode())
            signal.pause()
        finally:
            os._exit(1)
    assert readable(out)
    fds = [os.pidfd_open(int(worker)) for worker in os.read(out, 100).split()]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert len(fds) == 2
    for fd in fds:
        assert readable(fd), "the worker outlives its rank"
        ended = os.waitid(os.P_PIDFD, fd, os.WEXITED)
        # of itself torch's worker looks for its parent every five seconds, and exits otherwise; one
        # whose rank was gone before the kernel was asked to kill it ends with its own status
        assert ended is not None
        killed = ended.si_code == os.CLD_KILLED
        assert killed or ended.si_status == processes.EXIT_ORPHANED
        os.close(fd)


def test_an_iterable_data_set_is_refused(job: Job) -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter([torch.zeros(1)])

    with pytest.raises(TypeError, match="__getitem__"):
        loader_of(job, dataset=Stream())
