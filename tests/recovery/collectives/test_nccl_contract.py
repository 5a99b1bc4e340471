"""Ranks over a group that keeps ProcessGroupNCCL's contract: what NCCL would refuse, or wait for,
fails here.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.gpu.gpu_ranks import GpuRank, adam, batch, network
from tests.support.gpu.nccl_contract import Gpus, Nccl
from tests.support.running import LIMIT_S, until
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint.background import Snapshot
from trainchaos.recovery.checkpoint.chunks import chunks_of
from trainchaos.recovery.checkpoint.restore import votes
from trainchaos.recovery.collectives import buckets
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.collectives.sharded import ShardedReducer
from trainchaos.recovery.data import order
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.process.local import NCCL_WATCHDOG, rank_environment, start_store
from trainchaos.recovery.rank.step import exchange_totals
from trainchaos.recovery.state import digest
from trainchaos.recovery.state.digest import Digester
from trainchaos.recovery.state.fingerprint import fingerprint
from trainchaos.recovery.transport.wire import Finished, Joined, Parked

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SOON_S = LIMIT_S / 2  # below every timeout
Make = Callable[..., list[GpuRank]]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    for name in NCCL_WATCHDOG:  # put back afterwards
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 300)
    found = Gpus()
    found.install(monkeypatch)
    return found


@pytest.fixture
def make(gpus: Gpus, tmp_path: Path) -> Iterator[Make]:
    store, port = start_store()
    made: list[GpuRank] = []

    def ranks(count: int, **options: Any) -> list[GpuRank]:
        world = options.pop("world", count)
        made.extend(
            GpuRank(tmp_path, gpus, port, gpu, world=world, **options) for gpu in range(count)
        )
        return made

    yield ranks
    for rank in made:
        rank.channel.close()
    del store


def begin(ranks: list[GpuRank], generation: int = 1, *, to: int | None = None) -> None:
    """Have them form a generation; ``to``: the rank to which rank 0 copies its state."""
    for number, rank in enumerate(ranks):
        rank.join(
            generation, number, len(ranks), source=-1 if to is None else 0, receives=number == to
        )
    for rank in ranks:
        rank.hear(Joined)


def alone(steps: int) -> list[Tensor]:
    """The parameters after the same training by one process on the CPU."""
    model = network()
    optimizer = adam(list(model.parameters()))
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        samples = order.batch(step, 8, 64, 5)
        (model(batch(list(samples))).square().sum() / 8).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


# ---- whole steps


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("determinism", ["default", "elastic"])
def test_a_step_waits_once_for_the_device_and_hands_over_nothing_else(
    gpus: Gpus, make: Make, determinism: str
) -> None:
    ranks = make(2, determinism=determinism)
    begin(ranks)
    for rank in ranks:
        assert rank.hear(Finished).step == 4
        rank.stop()
    assert [rank.waits for rank in ranks] == [[1, 1, 1, 2]] * 2, "the last has a digest"
    assert ranks[0].numbers() == ranks[1].numbers()
    for mine, theirs in zip(ranks[0].job.state.trained.values(), alone(4), strict=True):
        assert torch.allclose(mine.detach(), theirs, rtol=1e-4, atol=1e-5)
    commits = ranks[1].events(Kind.STEP_COMMITTED)
    assert [event.data["samples"] for event in commits] == [8] * 4
    assert [event.data["optimizer_step"] for event in commits] == [1, 2, 3, 4]


@pytest.mark.parametrize("what", ["loss", "gradient"])
@pytest.mark.parametrize("determinism", ["default", "elastic"])
def test_who_is_not_finite_is_known_to_all_without_another_wait(
    gpus: Gpus, make: Make, what: str, determinism: str
) -> None:
    ranks = make(2, determinism=determinism)

    def spoil(step: int, loss: Tensor) -> Tensor:
        if step != 3:
            return loss
        if what == "loss":
            return loss * float("nan")
        last = next(iter(ranks[1].model.parameters()))
        last.register_hook(lambda gradient: gradient * float("inf"))
        return loss

    ranks[1].spoil = spoil
    begin(ranks)
    parked = [rank.hear(Parked) for rank in ranks]
    assert [(each.why, each.step, each.blamed) for each in parked] == [("nonfinite", 2, [1])] * 2
    assert [rank.waits for rank in ranks] == [[1, 1]] * 2


# ---- a spare


@pytest.mark.slow
def test_a_spare_gets_the_whole_state_whose_counters_are_on_the_cpu(gpus: Gpus, make: Make) -> None:
    first, second, spare = make(3, world=2, steps=6)
    reached = threading.Event()

    def hold(step: int) -> None:
        if step == 3 and not reached.is_set():
            reached.set()
            until(lambda: second.job.agent.heard.aborted_generation >= 1)

    second.hold = hold
    begin([first, second])
    assert reached.wait(LIMIT_S)
    # one may be a step behind whoever has reached the next
    until(lambda: first.job.state.step == 2)
    for rank in (first, second):
        rank.abort(1)
    assert [rank.hear(Parked).step for rank in (first, second)] == [2, 2]
    begin([first, spare], 2, to=1)
    for rank in (first, spare):
        assert rank.hear(Finished).step == 6
    assert spare.numbers() == first.numbers()
    steps = [slots["step"] for slots in spare.job.state.optimizer.state.values()]
    assert {(gpus.gpu_of(step), float(step)) for step in steps} == {(None, 6.0)}
    assert fingerprint_of(spare) == fingerprint_of(first)
    assert spare.events(Kind.STATE_DIGEST)[-1].data == {
        **first.events(Kind.STATE_DIGEST)[-1].data,
        "rank": 1,
    }


def fingerprint_of(rank: GpuRank) -> str:
    with rank.gpus.on(torch.device(rank.device).index):
        return fingerprint(rank.job.state)


# ---- leaving


@pytest.mark.slow
def test_a_rank_whose_peer_stands_still_leaves_with_its_state(gpus: Gpus, make: Make) -> None:
    """Its kernel ends without an error and with garbage: the supervisor's word alone tells."""
    first, second = ranks = make(2)
    reached, go_on = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if step == 2:
            reached.set()
            assert go_on.wait(LIMIT_S)

    second.hold = hold
    begin(ranks)
    assert reached.wait(LIMIT_S)
    until(lambda: first.job.state.step == 1 and first.job.marks.read().phase == "collective")
    before = first.numbers()
    since_s = time.monotonic()
    first.abort(1)
    parked = first.hear(Parked)
    assert (parked.why, parked.step, parked.valid) == ("aborted", 1, True)
    assert time.monotonic() - since_s < SOON_S
    assert first.numbers() == before
    second.abort(1)
    until(lambda: second.job.member.lost)  # it has the order before it goes on
    go_on.set()
    assert second.hear(Parked).why == "aborted"
    begin(ranks, 2)
    assert [rank.hear(Finished).step for rank in ranks] == [4, 4]
    assert first.numbers() == second.numbers()


@pytest.mark.slow
def test_a_rank_leaves_a_set_up_to_which_its_peer_does_not_come(gpus: Gpus, make: Make) -> None:
    first, second = make(2)
    first.join(1, 0, 2)
    until(lambda: bool(gpus.groups) and gpus.groups[0].entered.is_set())
    since_s = time.monotonic()
    first.abort(1)
    assert first.hear(Parked).why == "aborted"
    assert time.monotonic() - since_s < SOON_S
    # Its agent is through with the first generation then: the two are one process, whose sockets
    # are shut down.
    first.join(2, 0, 2)
    until(lambda: len(gpus.groups) > 1 and gpus.groups[1].entered.is_set())
    second.join(2, 1, 2)
    for rank in (first, second):
        assert rank.hear(Joined).step == 0
    assert [rank.hear(Finished).step for rank in (first, second)] == [4, 4]


def test_the_error_of_a_communicator_is_a_lost_generation_and_ends_no_process(
    gpus: Gpus, make: Make
) -> None:
    first, second = ranks = make(2)
    reached, go_on = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if step == 2 and not reached.is_set():
            reached.set()
            assert go_on.wait(LIMIT_S)

    second.hold = hold
    begin(ranks)
    assert reached.wait(LIMIT_S)
    until(lambda: first.job.state.step == 1 and first.job.marks.read().phase == "collective")
    for group in gpus.groups:
        group.fail("NCCL error: remote process exited or there was a network error")
    parked = first.hear(Parked)
    assert (parked.why, parked.step) == ("failed", 1) and "remote process exited" in parked.error
    go_on.set()
    assert second.hear(Parked).step == 1
    assert gpus.ended == [], "the watchdog ends a process that its supervisor would have kept"


def test_the_watchdog_is_told_at_birth_to_leave_ranks_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    found = rank_environment()
    assert {name: found[name] for name in NCCL_WATCHDOG} == NCCL_WATCHDOG
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == found["TORCH_NCCL_ENABLE_MONITORING"] == "0"


# ---- groups alone


def groups_of(port: int, *, shards: int = 1) -> list[Group]:
    return [
        Group(
            generation=1,
            rank=rank,
            world=2,
            store_port=port,
            backend="nccl",
            timeout_s=LIMIT_S,
            check=lambda: None,
            mesh=Mesh(shard=shards),
            device=f"cuda:{rank}",
        )
        for rank in range(2)
    ]


def together(gpus: Gpus, groups: list[Group], act: Callable[[Group], Any]) -> list[Any]:
    """What each of them returns, from a thread of its own."""

    def run(group: Group) -> Any:
        with gpus.on(group.device.index):
            if not hasattr(group, "everyone"):
                group.form()
            return act(group)

    with ThreadPoolExecutor(len(groups)) as pool:
        return [future.result(LIMIT_S) for future in [pool.submit(run, group) for group in groups]]


def test_what_is_on_the_cpu_is_refused_and_that_is_no_lost_generation(gpus: Gpus) -> None:
    store, port = start_store()
    groups = groups_of(port)
    together(gpus, groups, lambda group: None)
    with pytest.raises(ValueError, match="must be CUDA"):
        groups[0].start_all_reduce(torch.zeros(1))
    for group in groups:
        with gpus.on(group.device.index):
            group.leave()
    with pytest.raises(ValueError, match="on a GPU"):
        Group(
            generation=1,
            rank=0,
            world=1,
            store_port=port,
            backend="nccl",
            timeout_s=1.0,
            check=lambda: None,
        )
    del store


def test_words_of_all_ranks_are_read_from_the_device(gpus: Gpus) -> None:
    store, port = start_store()
    groups = groups_of(port)

    def say(group: Group) -> Any:
        device = str(group.device)
        known = [3.0, 0.5, 8.0, 1.0] if group.rank else []
        return votes(group, 4 + group.rank, device), exchange_totals(3, known, group, device)

    for given, reduced in together(gpus, groups, say):
        assert given == [4, 5]
        assert (reduced.loss, reduced.samples, reduced.grad_norm) == (0.5, 8, 1.0)
    del store


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_a_sharded_step_exchanges_what_is_on_the_device(gpus: Gpus, bad: int | None) -> None:
    store, port = start_store()

    def step(group: Group) -> Any:
        model = network().to(str(group.device))
        reducer = ShardedReducer(model, entering=lambda _: None)
        reducer.adopt()
        reducer.new_generation(group)
        device = group.device
        part, whole = (
            torch.full((3,), 1.0 + group.rank, device=device),
            torch.zeros(6, device=device),
        )
        reducer.gather(whole, part)
        reducer.begin()
        sums = torch.zeros(3, device=device)
        reducer.reduce_scatter(sums, whole * (float("nan") if bad == group.rank else 1.0))
        since = gpus.waited()
        found = reducer.finish(rank=group.rank, loss_sum=part.sum(), count=2)
        waits = gpus.waited() - since
        return whole.tolist(), found, waits, reducer.agree(group.rank == 0)

    for whole, found, waits, agreed in together(gpus, groups_of(port, shards=2), step):
        assert whole == [1.0] * 3 + [2.0] * 3
        assert (found.samples, found.loss) == (4, pytest.approx(9.0 / 4))
        assert found.blamed == (() if bad is None else (bad,))
        assert (waits, agreed) == (1, False)
    del store


def test_a_device_that_fails_is_not_taken_for_a_lost_generation(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, port = start_store()
    groups = groups_of(port)
    together(gpus, groups, lambda group: None)

    def failing(error: Exception) -> Callable[..., Any]:
        def fail(*_: Any) -> Any:
            raise error

        return fail

    for error, expected in (
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (dist.DistBackendError("NCCL error: unhandled system error"), GenerationLost),
    ):
        monkeypatch.setattr(Nccl, "allreduce", failing(error))
        with pytest.raises(expected):
            groups[0].start_all_reduce(torch.zeros(1))
    del store


# ---- GPUs and streams


def test_a_thread_begins_on_the_first_gpu_and_works_on_its_current_one(gpus: Gpus) -> None:
    def make(device: str) -> Tensor:
        return torch.zeros(2, device=device)

    with gpus.on(1), ThreadPoolExecutor(1) as pool:
        there, mine = make("cuda"), torch.cuda.current_stream("cuda:1")
        assert there.device == torch.device("cuda", 1)
        alone = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, Nccl.Options())  # type: ignore[arg-type]
        for act in (
            partial(make, "cuda:1"),
            partial(torch.cuda.current_stream, "cuda:1"),
            there.tolist,
            partial(torch.cuda.Event().record, mine),
            partial(alone.allreduce, [there]),
        ):
            with pytest.raises(AssertionError, match="current GPU is 0"):
                pool.submit(act).result(LIMIT_S)
        pool.submit(torch.cuda.set_device, 1).result(LIMIT_S)
        assert pool.submit(make, "cuda").result(LIMIT_S).device.index == 1


def test_what_an_operation_uses_is_not_let_go_of_before_anything_comes_after_it(gpus: Gpus) -> None:
    """By whoever calls NCCL; a group keeps it for those who call that."""
    store, port = start_store()
    groups = groups_of(port)
    together(gpus, groups, lambda group: None)

    def careless(group: Group) -> Any:
        mine = next(made for made in gpus.groups if made.rank == group.rank)
        work = mine.allreduce([torch.ones(3, device="cuda")])
        with pytest.raises(AssertionError, match="allreduce was let go of"):
            work.wait()

    def careful(group: Group) -> Any:
        work = group.start_all_reduce(torch.ones(3, device="cuda"))
        group.wait(work)
        return group.read(torch.ones(1, device="cuda"))

    assert together(gpus, groups, careful) == [[1.0]] * 2
    together(gpus, groups, careless)
    del store


def test_what_only_a_stream_waits_for_is_not_done(gpus: Gpus) -> None:
    store, port = start_store()
    told = threading.Event()

    def count(group: Group) -> list[int]:
        until(lambda: not group.unfinished())  # what connected it
        if group.rank == 1:
            assert told.wait(LIMIT_S)
        found = [group.unfinished()]
        group.wait(group.start_all_reduce(torch.ones(3, device="cuda")))
        if group.rank == 0:
            found.append(group.unfinished())
            told.set()
        group.settle()
        return [*found, group.unfinished()]

    assert together(gpus, groups_of(port), count) == [[0, 1, 0], [0, 0]]
    del store


def test_what_a_set_up_left_behind_makes_at_the_last_moment_is_aborted_and_kept_until_it_ends(
    gpus: Gpus,
) -> None:
    ended, forming, uses = threading.Event(), Future[Any](), torch.ones(1)
    group = groups_of(0)[0]
    kept = weakref.ref(uses)
    group.began(SimpleNamespace(is_completed=ended.is_set), uses)  # type: ignore[arg-type]
    forming.set_result([])
    seen: list[bool] = []

    def abort() -> None:
        seen.append(kept() is not None)
        ended.set()

    del uses
    group._see_off(forming, [SimpleNamespace(abort=abort)], set())
    assert seen[:1] == [True] and ended.is_set()


def test_a_copy_for_a_save_has_arrived_when_it_is_handed_on(gpus: Gpus) -> None:
    with gpus.on(1):
        tensors = {
            name: torch.arange(40.0, device="cuda") + place for place, name in enumerate("ab")
        }
        since = gpus.waited()
        copies = Snapshot().take(chunks_of(tensors))
        assert gpus.waited() - since == 1
    assert [copy.data.tolist() for copy in copies] == [
        [place + n for n in range(40)] for place in range(2)
    ]
    assert not any(copy.data.is_cuda for copy in copies)


# ---- digests


def digests_of(gpus: Gpus, tensor: Tensor) -> str:
    digester = Digester()
    digester.add("all", "tensor", tensor)
    return digester.digests()["all"]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]
)
def test_a_digest_is_taken_on_the_device_with_one_wait_and_in_pieces(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(digest, "WORDS", 4)
    generator = torch.Generator().manual_seed(3)
    values = (torch.rand(101, generator=generator) * 100).to(dtype)
    with gpus.on():
        again = digests_of(gpus, values.to("cuda:0"))
    with gpus.on(1):
        there = values.to("cuda:1")
        since = gpus.waited()
        first = digests_of(gpus, there)
        assert gpus.waited() - since == 1
        assert first == again == digests_of(gpus, there.clone())
        assert first == digests_of(gpus, torch.stack([there, there], dim=1)[:, 0]), (
            "whatever its strides"
        )
        seen = {first, digests_of(gpus, there.flip(0)), digests_of(gpus, there[:-1])}
        raw = there.view(torch.uint8)
        for place in (0, 37, len(raw) - 1):
            raw[place] ^= 1
            seen.add(digests_of(gpus, there))
            raw[place] ^= 1
        assert len(seen) == 6
        assert digests_of(gpus, there) == first


def test_two_values_that_change_places_show(gpus: Gpus) -> None:
    """A sum of words would not tell; nor of words that grow and shrink by the same."""
    with gpus.on():
        plain = torch.arange(64, device="cuda:0")
        other, shifted = plain.clone(), plain.clone()
        other[3], other[40] = 40, 3
        shifted[3] += 5
        shifted[40] -= 5
        assert len({digests_of(gpus, each) for each in (plain, other, shifted)}) == 3


@pytest.mark.slow
def test_the_state_is_looked_through_with_one_wait(gpus: Gpus, make: Make) -> None:
    (rank,) = make(1)
    begin([rank])
    rank.hear(Finished)
    state = rank.job.state
    with gpus.on():
        since = gpus.waited()
        assert state.not_finite() is None and gpus.waited() - since == 1
        name = "optimizer.2.weight.exp_avg"
        state.parts()[name].view(-1)[3] = float("nan")
        assert state.not_finite() == name
        since = gpus.waited()
        partial(fingerprint, state)()
        assert gpus.waited() - since == 1
        since = gpus.waited()
        state.digests()
        assert gpus.waited() - since == 1
