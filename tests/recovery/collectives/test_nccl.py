"""NCCL: leaving a group from another thread while the training thread waits for the device."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.running import LIMIT_S
from trainchaos.recovery.collectives.group import GenerationLost, Group
from trainchaos.recovery.collectives.nccl import recorder
from trainchaos.recovery.detection.flight_recorder import recalled
from trainchaos.recovery.process.local import start_store

GPUS = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
NEEDS_GPU = pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU and a torch with NCCL")
SPIN_CYCLES = 4_000_000_000  # a kernel of a few seconds


class Told:
    """The supervisor's word, as ``Job.check`` has it."""

    def __init__(self) -> None:
        self.aborted = False

    def check(self) -> None:
        """Raise once aborted."""
        if self.aborted:
            raise GenerationLost("aborted by the supervisor")


def group_of(told: Told, port: int, *, generation: int = 1) -> Group:
    return Group(
        generation=generation,
        rank=0,
        world=1,
        store_port=port,
        backend="nccl",
        timeout_s=LIMIT_S,
        check=told.check,
        device="cuda:0",
    )


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.real
def test_an_abort_reaches_a_thread_that_waits_for_the_device() -> None:
    told = Told()
    store, port = start_store()
    torch.cuda.set_device(0)
    group = group_of(told, port)
    group.form()
    tensor = torch.ones(1 << 20, device="cuda")
    group.wait(group.start_all_reduce(tensor))
    assert float(tensor[0]) == 1.0
    waiting = threading.Event()

    def agent() -> None:
        assert waiting.wait(LIMIT_S)
        told.aborted = True
        group.abort()
        group.abort()  # it is repeated until the training thread is out

    thread = threading.Thread(target=agent)
    thread.start()
    torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
    group.wait(group.start_all_reduce(tensor))
    waiting.set()
    since = time.monotonic()
    with pytest.raises(GenerationLost):
        torch.cuda.current_stream().synchronize()
        group.settle()
    thread.join(LIMIT_S)
    assert not thread.is_alive() and time.monotonic() - since < LIMIT_S
    group.leave()
    told.aborted = False
    again = group_of(told, port, generation=2)
    again.form()
    fresh = torch.full((1024,), 3.0, device="cuda")
    again.wait(again.start_all_reduce(fresh))
    assert float(fresh.sum()) == 3 * 1024
    again.leave()
    del store


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.real
def test_the_flight_recorder_tells_which_collective_is_under_way() -> None:
    told = Told()
    store, port = start_store()
    torch.cuda.set_device(0)
    group = group_of(told, port, generation=3)
    group.form()
    tensor = torch.ones(1 << 20, device="cuda")
    group.wait(group.start_all_reduce(tensor))
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
    work = group.start_all_reduce(tensor)
    found = recalled(1, "nccl", 3, 0, recorder)
    assert not work.is_completed(), "the device was too fast: spin longer"
    assert found.why == ""
    last, under_way = found.entries
    assert (last.state, under_way.state != "done") == ("done", True)
    assert under_way.seq == last.seq + 1 and under_way.op == "all_reduce"
    assert under_way.group == "generation-3" and under_way.sizes == f"{1 << 20} Float"
    group.wait(work)
    torch.cuda.synchronize()
    group.leave()
    del store


@pytest.mark.skipif(GPUS < 2, reason=f"needs two NVIDIA GPUs, there are {GPUS}")
@pytest.mark.gpu
@pytest.mark.real
def test_ranks_whose_peer_stands_still_leave_a_collective() -> None:
    """Two members in one process: the second never enters the collective that the first
    waits in.
    """
    told = [Told(), Told()]
    store, port = start_store()
    groups = [
        Group(
            generation=1,
            rank=rank,
            world=2,
            store_port=port,
            backend="nccl",
            timeout_s=LIMIT_S,
            check=told[rank].check,
            device=f"cuda:{rank}",
        )
        for rank in range(2)
    ]

    def meet(rank: int) -> None:
        torch.cuda.set_device(rank)
        groups[rank].form()
        groups[rank].wait(groups[rank].start_all_reduce(torch.ones(8, device=f"cuda:{rank}")))
        torch.cuda.synchronize(rank)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    torch.cuda.set_device(0)
    groups[0].wait(groups[0].start_all_reduce(torch.ones(8, device="cuda:0")))

    def agent() -> None:
        told[0].aborted = True
        groups[0].abort()

    timer = threading.Timer(0.2, agent)
    timer.start()
    since = time.monotonic()
    with pytest.raises(GenerationLost):
        groups[0].settle()
    assert time.monotonic() - since < LIMIT_S / 2, "not at the timeout"
    timer.join(LIMIT_S)
    for group in groups:
        group.leave()
    del store
