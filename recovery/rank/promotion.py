"""How a generation with a live spare gets its state: ranks compare what they hold, and only what is
missing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainchaos.recovery.collectives.group import Circle, GenerationLost, Group
from trainchaos.recovery.collectives.transfer import CHUNK_BYTES, MAX_SCALAR_BYTES
from trainchaos.recovery.policy.layout import Layout
from trainchaos.recovery.spares import replay
from trainchaos.recovery.spares.feeds import retold
from trainchaos.recovery.spares.hostcopy import COPY_S
from trainchaos.recovery.spares.live import Live
from trainchaos.recovery.spares.standing import WORDS, Standing, in_want, number_of, one_behind
from trainchaos.recovery.state.fingerprint import fingerprint, sampled_digest
from trainchaos.recovery.transport.wire import Follow, Following, Join, Settled

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import Job
    from trainchaos.recovery.rank.recipe import Attached


def live_of(job: Job) -> Live | None:
    """What ``job`` holds for live spares; None where there are none."""
    if job.config.sync != "live":
        return None

    def changed() -> None:
        job.member.holding.fresh = False

    return Live(
        job.config,
        job.state,
        sampled=sampled_digest,
        fingerprint=fingerprint,
        write=job.write,
        changed=changed,
    )


def listen(job: Job) -> None:
    """Follow whoever feeds this process from now on; where several ranks hold the model together,
    once it is told which part (``take_place``).
    """
    if job.live is None:
        return
    job.agent.on_feed = job.live.feeds.told
    if job.config.shards == 1:
        job.live.feeds.prepare(job.reducer)
        job.live.waits()


def fed_at(job: Job) -> str:
    """Where this process is fed ("": nowhere)."""
    return "" if job.live is None else job.live.address


def take_part(job: Job, attached: Attached, rank: int) -> None:
    """Hold the part of the model that this rank does, if it is not held yet. Raises RuntimeError
    where that cannot be.
    """
    if attached.take_part(rank, job.layout) and job.live is not None:
        job.live.feeds.prepare(job.reducer)


def take_place(job: Job, order: Follow, attached: Attached) -> None:
    """Hold the part that this spare is to follow, as a rank of the first replica would, and say
    where it is fed. Raises RuntimeError as ``take_part``.
    """
    if job.live is not None:
        job.layout = Layout(world=job.config.world, shards=job.config.shards)
        before = job.rank, job.world
        job.rank, job.world = order.shard, job.config.world  # the script's cut may ask for them
        try:
            take_part(job, attached, order.shard)
        finally:
            job.rank, job.world = before
        job.live.waits()
        job.agent.channel.send(Following(shard=order.shard, live=job.live.address))


def settle(job: Job) -> None:
    """Say what this spare holds, once nothing more of what it follows arrives."""
    step = -1 if job.live is None else job.live.settled(job.check)
    job.agent.channel.send(Settled(step=step))


def wanting(job: Job, live: Live, order: Join, group: Group) -> tuple[tuple[int, ...], int]:
    """Ranks that need a copy of the state of ``order.source``, once each has got what it lacks of
    the last step; a collective of all that hold the same part, nothing where none of them receives.
    Returns the ranks, and the bytes that came here. Raises GenerationLost.
    """
    claims = job.member.holding.valid
    if live.follower is not None:
        if order.receives:
            live.follower.settle(order.live, job.check)
            claims = live.follower.step >= 0
        live.promoted()
    circle, source = group.holders, order.source
    if source < 0:
        return (), 0
    standings = _compared(job, live, order, circle, claims=claims)
    late = one_behind(standings, source)
    if not late:
        return in_want(standings, source), 0
    size = _finish(job, live, circle, source, applies=job.rank in late)
    return in_want(_compared(job, live, order, circle, claims=claims), source), size


def _compared(
    job: Job, live: Live, order: Join, circle: Circle, *, claims: bool
) -> dict[int, Standing]:
    """What each rank brings, known to all."""
    held = live.feeds.retained
    mine = Standing(
        receives=order.receives,
        step=job.state.step if claims else -1,
        digest=number_of(sampled_digest(job.state)) if claims else 0,
        retained=held.step if held is not None else -1,
    )
    table = torch.zeros(len(circle.ranks), WORDS, dtype=torch.int64)
    table[circle.ranks.index(job.rank)] = torch.tensor(mine.words())
    table = table.to(_wire(job, circle))
    circle.wait(circle.start_all_reduce(table))
    rows = circle.read(table)
    return {rank: Standing.of(row) for rank, row in zip(circle.ranks, rows, strict=True)}


def _finish(job: Job, live: Live, circle: Circle, source: int, *, applies: bool) -> int:
    """Have ranks that lack the last step apply it, with gradients that ``source`` has kept; returns
    the bytes received.
    """
    state, held = job.state, live.feeds.retained
    header: dict[str, Any] = {}
    payload: list[memoryview] = []
    with ExitStack() as after:
        if job.rank == source:
            assert held is not None
            item = retold(state, held)
            after.callback(item.done)
            for copy in item.copies:
                copy.wait(COPY_S, job.check)
                payload += copy.views
            header = item.header | {"sizes": [part.nbytes for part in payload]}
        header = _share_header(header, job, circle, source)
        parts = [_share(part, circle, source, job) for part in payload or header["sizes"]]
    if not applies:
        return 0
    names = header["names"]
    like = next(iter(state.trained.values()))
    given = [part.view(like.dtype).to(like.device) for part in parts[: len(names)]]
    gradients = replay.gradients_of(state, names, given, header["none"])
    job.member.holding.receives()
    replay.apply(state, gradients, header["step"], header["loss"])
    besides = state.besides().values()
    for tensor, part in zip(besides, parts[len(names) :], strict=True):
        replay.put(tensor, memoryview(part.cpu().numpy().data))
    state.load_scalars(header["scalars"])
    return sum(header["sizes"])


def _wire(job: Job, circle: Circle) -> torch.device:
    """Where tensors are that ranks send to each other: NCCL sends those of its device."""
    return torch.device(job.device if circle.backend == "nccl" else "cpu")


def _share_header(header: dict[str, Any], job: Job, circle: Circle, source: int) -> dict[str, Any]:
    data, wire = json.dumps(header).encode() if header else b"", _wire(job, circle)
    size = torch.tensor([len(data)], dtype=torch.int64, device=wire)
    circle.broadcast(size, source)
    length = int(size)
    if not 0 < length <= MAX_SCALAR_BYTES:
        raise GenerationLost(f"a peer announced {length} bytes of a step")
    message = torch.frombuffer(bytearray(data or length), dtype=torch.uint8).to(wire)
    circle.broadcast(message, source)
    return dict(json.loads(message.cpu().numpy().tobytes()))


def _share(part: memoryview | int, circle: Circle, source: int, job: Job) -> Tensor:
    """Bytes of ``source``, on all ranks; in messages of CHUNK_BYTES at most."""
    if isinstance(part, int):
        whole = torch.empty(part, dtype=torch.uint8)
    else:
        whole = torch.frombuffer(part if part.nbytes else bytearray(0), dtype=torch.uint8)
    whole = whole.to(_wire(job, circle))
    pieces: Sequence[Tensor] = whole.split(CHUNK_BYTES) if whole.numel() else ()
    for piece in pieces:
        circle.broadcast(piece, source)
        job.marks.touch()
    return whole
