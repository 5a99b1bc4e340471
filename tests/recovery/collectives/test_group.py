"""The process group that can be left at any moment: waits, aborts, regrouping, with real gloo
groups.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from tests.support.open_files import open_files
from tests.support.ranks import Self, ranks, results
from tests.support.running import LIMIT_S
from trainchaos.recovery.collectives import sockets, transfer
from trainchaos.recovery.collectives.group import MOST_BEGUN, GenerationLost, Group
from trainchaos.recovery.process.local import start_store
from trainchaos.recovery.state.state import TrainState


class LateWork:
    """An operation that ends just after a timed wait for it has given up."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.waits = 0

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Times out the first time, tells the truth afterwards."""
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        """It ended meanwhile."""
        return True


def make_group(check: Callable[[], None] = lambda: None) -> Group:
    """A group that nobody has formed."""
    return Group(
        generation=1, rank=0, world=2, store_port=1, backend="gloo", timeout_s=1.0, check=check
    )


def test_work_that_completes_as_its_timed_wait_ends_is_not_a_failure() -> None:
    group = make_group()
    group.wait(LateWork())  # type: ignore[arg-type]
    assert not group.abandoned


def test_work_that_fails_as_its_timed_wait_ends_is_one() -> None:
    with pytest.raises(GenerationLost, match="closed by peer"):
        make_group().wait(LateWork("Connection closed by peer"))  # type: ignore[arg-type]


# ---- real groups


def summed(group: Group) -> float:
    """The sum of all ranks, each giving 1 + its rank."""
    tensor = torch.full((1000,), 1.0 + group.rank)
    group.wait(group.start_all_reduce(tensor))
    return float(tensor[0])


def meet(me: Self) -> tuple[float, float]:
    """Two collectives in two generations."""
    first = me.group(1)
    first.form()
    one = summed(first)
    me.leave()
    second = me.group(2)
    second.form()
    return one, summed(second)


@pytest.mark.real
def test_a_group_can_be_left_and_formed_again() -> None:
    assert results(meet, 3) == [(6.0, 6.0)] * 3


def count_begun(me: Self) -> list[int]:
    """Operations that were begun and are not done, before and after one with a single peer."""
    group = me.group(1)
    group.form()
    part, found = torch.ones(3), [group.unfinished()]
    if me.rank == 0:
        work = group.everyone.receive(part, 1, 0)
        found.append(group.unfinished())
        me.say("begun")
    else:
        me.hear()
        work = group.everyone.send(part, 0, 0)
    group.wait(work)
    found += [group.unfinished(), len(group.begun.take())]
    for _ in range(3 * MOST_BEGUN):
        group.start_all_reduce(torch.ones(1))  # nobody waits for it
    for _ in range(2):
        summed(group)  # by then all are done, or nearly
    return [*found, len(group.begun.take())]


@pytest.mark.real
def test_what_a_rank_has_begun_and_is_not_done_is_counted() -> None:
    with ranks(count_begun, 2) as started:
        assert started[0].said() == "begun"
        started[1].tell("send")
        first, second = (rank.result() for rank in started)
    assert first[:4] == [0, 1, 0, 0] and second[:3] == [0, 0, 0]
    assert max(first[4], second[3]) <= MOST_BEGUN, "what is done is forgotten"


def wait_for_abort(me: Self) -> float | tuple[float, float]:
    """Wait in a collective that a stopped peer never enters; then go on without it."""
    group = me.group(1)
    group.form()
    summed(group)
    me.say("in")
    if me.rank == 2:
        me.hear()  # stopped here
    me.hear()
    me.say("waiting")
    try:
        summed(group)
    except GenerationLost:
        lost = time.monotonic()
    me.leave()
    rest = me.group(2, world=2)
    rest.form()
    return lost, summed(rest)


@pytest.mark.real
def test_an_abort_frees_all_who_wait_for_a_stopped_rank_and_they_can_go_on_without_it() -> None:
    with ranks(wait_for_abort, 3) as started:
        for rank in started:
            rank.said()
        started[2].signal(signal.SIGSTOP)
        for rank in started[:2]:
            rank.tell("go")
            rank.said()
        told = time.monotonic()
        for rank in started[:2]:
            rank.tell(("abort", 1))
        for rank in started[:2]:
            lost, total = rank.result()
            assert lost - told < LIMIT_S / 2, "not at the timeout"
            assert total == 3.0


@pytest.mark.real
@pytest.mark.parametrize(
    "victim", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)]
)
def test_a_dead_peer_and_an_abort_free_everybody_again_and_again(victim: int) -> None:
    with ranks(outlive, 3) as started:
        for rank in started:
            rank.said()
        started[victim].signal(signal.SIGKILL)
        left = [rank for number, rank in enumerate(started) if number != victim]
        for new, rank in enumerate(left):
            rank.tell(new)
            rank.said()
        for rank in left:
            rank.tell(("abort", 1))
        assert [rank.result() for rank in left] == [3.0, 3.0]


def outlive(me: Self) -> float:
    """Reduce until a peer dies, then go on with the other one."""
    group = me.group(1)
    group.form()
    summed(group)
    me.say("in")
    new = me.hear()
    me.say("waiting")
    with contextlib.suppress(GenerationLost):
        summed(group)
        raise AssertionError("a peer is dead")
    me.leave()
    rest = me.group(2, rank=new, world=2)
    rest.form()
    return summed(rest)


def form_alone(me: Self) -> tuple[str, float]:
    """Wait for a member that never comes."""
    group = me.group(1, world=2)
    me.say("forming")
    try:
        group.form()
    except GenerationLost as error:
        return str(error), time.monotonic()
    return "formed", time.monotonic()


@pytest.mark.real
def test_an_abort_frees_a_rank_that_waits_for_the_others_to_come() -> None:
    with ranks(form_alone, 1) as started:
        started[0].said()
        told = time.monotonic()
        started[0].tell(("abort", 1))
        why, lost = started[0].result()
        assert "could not form" in why or "aborted" in why, "whichever is noticed first"
        assert lost - told < LIMIT_S / 2, "not at the timeout"


def test_an_abort_frees_a_rank_whose_peer_was_lost_before_it_connected() -> None:
    """It listens, and has no connection yet that could be shut down."""
    _store, port = start_store()
    stuck, go_on = threading.Event(), threading.Event()
    aborted: list[bool] = []

    def check() -> None:
        if aborted:
            raise GenerationLost("aborted by the supervisor")

    def lost(name: str, address: tuple[str, int]) -> tuple[str, int]:
        """It has said where it listens, and gets no further."""
        stuck.set()
        go_on.wait(LIMIT_S)
        return address

    def member(rank: int, dial: Callable[[str, tuple[str, int]], tuple[str, int]]) -> Group:
        return Group(
            generation=1,
            rank=rank,
            world=2,
            store_port=port,
            backend="gloo",
            timeout_s=LIMIT_S,
            check=check,
            dial=dial,
            name=f"w{rank}",
        )

    listener, peer = member(0, lambda name, address: address), member(1, lost)
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(peer.form)
        mine = pool.submit(listener.form)
        assert stuck.wait(LIMIT_S)
        since = time.monotonic()
        aborted.append(True)
        with pytest.raises(GenerationLost, match="aborted"):
            mine.result(timeout=LIMIT_S)
        assert time.monotonic() - since < LIMIT_S / 2, "not at the timeout"
        go_on.set()
        with pytest.raises(GenerationLost):
            others.result(timeout=LIMIT_S)


LEAVES = """
import time
from trainchaos.recovery.collectives.group import Group
class Slow(list):
    def clear(self):
        time.sleep(0.3)
        print("cleared", flush=True)
group = Group(
    generation=1, rank=0, world=1, store_port=1, backend="gloo", timeout_s=1.0, check=lambda: None
)
group._made = Slow()
group.leave()
"""


@pytest.mark.slow
def test_python_does_not_end_before_its_groups_have() -> None:
    """A thread that comes back from gloo and finds no interpreter aborts the process."""
    ran = subprocess.run(
        [sys.executable, "-c", LEAVES],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "cleared\n", "")


def abort_twice(me: Self) -> list[bool]:
    """Sockets that are not the group's survive its abort."""
    ours, theirs = socket.socketpair()
    listening = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listening.getsockname())
    server, _ = listening.accept()
    group = me.group(1)
    group.form()
    summed(group)
    broken = group.abort()
    group.abort()
    ours.sendall(b"x")
    client.sendall(b"y")
    return [broken > 0, theirs.recv(1) == b"x", server.recv(1) == b"y", listening.fileno() >= 0]


@pytest.mark.real
def test_an_abort_breaks_the_groups_own_sockets_only() -> None:
    assert results(abort_twice, 2) == [[True] * 4] * 2


def leave_one_after_another(me: Self) -> list[int]:
    """File descriptors and threads over many generations."""
    counts = []
    for generation in range(1, 13):
        group = me.group(generation)
        group.form()
        summed(group)
        me.leave()
        me.settle()
        counts.append(open_files())
    return counts


@pytest.mark.real
@pytest.mark.long
def test_generations_leave_nothing_behind() -> None:
    for counts in results(leave_one_after_another, 2):
        assert max(counts[-3:]) <= counts[2] + 2, f"descriptors leak: {counts}"


# ---- state transfer


def state(seed: int, device: str = "cpu") -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed, fused=True)
    held = TrainState(model, optimizer, LambdaLR(optimizer, lambda step: 1 / (step + 3)), seed=9)
    for step in range(1, seed + 1):
        model(torch.randn(4, 5).to(device)).sum().backward()
        held.apply(0.0)
        held.step = step
    return held


def receive(
    source: int, receivers: tuple[int, ...], me: Self
) -> tuple[dict[str, str], dict[str, str], int]:
    """Copy the state of one rank to others, in several chunks."""
    transfer.CHUNK_BYTES = 64
    mine = state(me.rank + 1)
    before = mine.digests()
    group = me.group()
    group.form()
    calls: list[int] = []
    transfer.copy_state(
        mine,
        group.everyone,
        source=source,
        receive=me.rank in receivers,
        progress=lambda: calls.append(1),
    )
    assert len(calls) > 3
    return before, mine.digests(), mine.step


@pytest.mark.real
@pytest.mark.parametrize(
    ("source", "receivers"),
    [
        (0, (1, 2)),
        pytest.param(2, (0,), marks=pytest.mark.long),
        pytest.param(1, (0, 2), marks=pytest.mark.long),
        (1, ()),
    ],
)
def test_a_copied_state_is_exact_and_who_needs_none_keeps_its_own(
    source: int, receivers: tuple[int, ...]
) -> None:
    got = results(partial(receive, source, receivers), 3)
    wanted = got[source][0]
    for rank, (before, after, step) in enumerate(got):
        assert after == (wanted if rank in receivers else before)
        assert step == (source + 1 if rank in receivers else rank + 1)


def receive_directly(
    pairs: dict[int, int], device: str, me: Self
) -> tuple[dict[str, str], dict[str, str], int]:
    """Copy states from rank to rank, in several chunks, while the others use the group."""
    transfer.CHUNK_BYTES = 64
    mine = state(me.rank + 1, device)
    before = mine.digests()
    group = me.group()
    group.form()
    feeds = [to for to, source in pairs.items() if source == me.rank]
    if feeds or me.rank in pairs:
        transfer.copy_state(
            mine,
            group.everyone,
            source=pairs.get(me.rank, me.rank),
            receive=me.rank in pairs,
            progress=lambda: None,
            feeds=feeds,
            device=device,
        )
    assert summed(group) == 10.0
    return before, mine.digests(), mine.step


@pytest.mark.real
@pytest.mark.parametrize(
    "pairs",
    [
        {1: 0},
        {0: 2, 3: 1},
        pytest.param({0: 3, 1: 3, 2: 3}, marks=pytest.mark.long),
        pytest.param({3: 0}, marks=pytest.mark.long),
    ],
)
def test_a_state_copied_from_rank_to_rank_is_exact_and_takes_nobody_else(
    pairs: dict[int, int],
) -> None:
    copied_exactly(pairs, "cpu")


def copied_exactly(pairs: dict[int, int], device: str) -> None:
    got = results(partial(receive_directly, pairs, device), 4)
    for rank, (before, after, step) in enumerate(got):
        source = pairs.get(rank, rank)
        assert after == (got[source][0] if rank in pairs else before)
        assert step == source + 1


@pytest.mark.gpu
@pytest.mark.real
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_state_on_a_gpu_goes_from_rank_to_rank_over_gloo() -> None:
    copied_exactly({0: 2, 3: 1}, "cuda:0")


def nothing_to_say(me: Self) -> int:
    """Send a message without bytes, as of parts without elements, and one with some."""
    group = me.group()
    group.form()
    route = transfer._Direct(group.everyone, 0, [1] if me.rank == 0 else [])
    empty, word = torch.empty(0, dtype=torch.uint8), torch.full((3,), 7 * (1 - me.rank))
    for message in (empty, word):
        transfer._done(route, route.start(message))
    return int(word.sum())


@pytest.mark.real
def test_a_message_without_bytes_keeps_the_order_of_the_others() -> None:
    assert results(nothing_to_say, 2) == [21, 21]


def lose_a_peer(source: int, victim: int, to: int | None, me: Self) -> str:
    """Copy state while one rank dies in the middle of it. ``to``: from rank to rank, to this one
    alone; who takes no part goes on.
    """
    transfer.CHUNK_BYTES = 64
    mine = state(me.rank + 1)
    group = me.group()
    group.form()
    summed(group)

    def progress() -> None:
        if me.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    me.say("copying")
    feeds = None if to is None else [to] if me.rank == source else []
    try:
        if to is None or me.rank in (source, to):
            transfer.copy_state(
                mine,
                group.everyone,
                source=source,
                receive=me.rank != source,
                progress=progress,
                feeds=feeds,
            )
        if to is not None:
            summed(group)
    except GenerationLost:
        return "lost"
    return "copied"


@pytest.mark.sample(1)
@pytest.mark.real
@pytest.mark.parametrize(
    ("source", "victim", "to"),
    [(0, 0, None), (0, 1, None), (1, 2, None), (2, 0, None), (0, 0, 1), (0, 1, 1)],
)
def test_a_rank_that_dies_during_a_transfer_is_noticed_by_who_needs_it(
    source: int, victim: int, to: int | None
) -> None:
    with ranks(partial(lose_a_peer, source, victim, to), 3) as started:
        left = [rank for number, rank in enumerate(started) if number != victim]
        for rank in left:
            rank.said()
        started[victim].process.join(LIMIT_S)
        for rank in left:
            with contextlib.suppress(BrokenPipeError):  # one that has noticed by itself may be done
                rank.tell(("abort", 1))
        assert [rank.result() for rank in left] == ["lost", "lost"]


def test_a_descriptor_that_became_a_file_meanwhile_is_left_alone(tmp_path: Path) -> None:
    """As when a checkpoint is opened in the moment between the look at the descriptors and the
    breaking.
    """
    with open(tmp_path / "file", "w") as stream:
        before = os.fstat(stream.fileno())
        assert not sockets._shut_down_one(stream.fileno(), "socket:[1]", False)
        now = os.fstat(stream.fileno())
        assert (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
        stream.write("still open")


def test_looking_at_sockets_leaves_them_as_they_are() -> None:
    """Also in a script that has set a default timeout, with which a socket object is made so that
    nothing blocks, for all that share it.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client, server.accept()[0] as accepted:
            before = socket.getdefaulttimeout()
            socket.setdefaulttimeout(5.0)
            try:
                found = sockets.connections({address}, {address})
                sockets.keep_alive(found)
            finally:
                socket.setdefaulttimeout(before)
            assert len(found) == 2, "both ends, and not the listener"
            for one in (server, client, accepted):
                assert os.get_blocking(one.fileno())
            assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
