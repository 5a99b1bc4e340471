"""How a rank that joins a generation gets its state: it keeps its own, copies a peer's, restores a
checkpoint, or, as a live spare, gets only what is missing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint import own
from trainchaos.recovery.collectives.group import Circle, Group
from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.collectives.transfer import CHUNK_BYTES, MAX_SCALAR_BYTES, copy_state
from trainchaos.recovery.rank.step import JobContext, complete, exchange_totals
from trainchaos.recovery.spares import replay
from trainchaos.recovery.spares.feeds import retold
from trainchaos.recovery.spares.hostcopy import COPY_S
from trainchaos.recovery.spares.live import Live
from trainchaos.recovery.spares.standing import WORDS, Standing, in_want, number_of, one_behind
from trainchaos.recovery.state.fingerprint import sampled_digest
from trainchaos.recovery.transport.wire import Join, StateSource


def take_state(job: JobContext, order: Join, group: Group) -> str | None:
    """Get the generation's state; returns the checkpoint's name if this rank restored one. Raises
    GenerationLost, and NothingToRestore when nothing can bring the state back.
    """
    holding, layout, rank, state = job.member.holding, job.layout, job.rank, order.state
    if state.finish:
        _finish(job, state.finish, group)
    job.state.attempt.undo()
    kept = _own_before(job, state)
    started = time.perf_counter()
    name: str | None = None
    origin = "kept" if job.state.step else "initial"
    if job.live is not None and job.live.brings:
        origin = "live"
    if state.restore and (rank == 0 or layout.shards > 1):
        holding.restores()
        name = job.checkpoints.restore(group, layout)
        found = name is not None
        if state.receives:
            name = None  # this rank gets a copy of what another rank loads
        elif name is None:
            job.checkpoints.require(anew=order.resume.anew, fresh=holding.fresh)
        origin = "checkpoint" if name else "initial"
        holding.restored(found=found)
    extra: dict[str, Any] = {}
    if state.live >= 0 and job.live is not None:
        origin, extra = _complete(job, job.live, state, group, origin)
    else:
        if state.receives:
            holding.receives()
            origin = "peer"
        if state.source >= 0:
            _copy(job, state, group, receive=state.receives)
    if _take_own(job, kept) or (state.restore and origin == "peer"):
        extra["own"] = True
    holding.valid = True
    job.write(
        Kind.STATE_READY,
        step=job.state.step,
        rank=rank,
        origin=origin,
        source=state.source if origin in ("peer", "live") else name,
        seconds=round(time.perf_counter() - started, 6),
        **extra,
    )
    return name


def _copy(job: JobContext, state: StateSource, group: Group, *, receive: bool) -> None:
    copy_state(
        job.state,
        group.holders,
        source=state.source,
        receive=receive,
        feeds=state.feeds if state.direct else None,
        progress=job.marks.touch,
        device=job.config.device,
    )


def _own_before(job: JobContext, state: StateSource) -> tuple[int, Tensor] | None:
    """What this rank is to keep of its own although it copies a peer's state, and its step: it has
    left for a value that was not finite.
    """
    if not state.receives or state.restore or not job.member.holding.retries:
        return None
    return job.state.step, own.packed(job.state)


def _take_own(job: JobContext, kept: tuple[int, Tensor] | None) -> bool:
    """Take over what a checkpoint has of this rank's own, or what it was to keep; returns whether
    there was any.
    """
    state = job.state
    mine, state.own = state.own.get(own.name(job.layout, job.rank)), {}
    if mine is None and kept is not None and kept[0] == state.step:
        mine = kept[1]
    if mine is not None:
        own.unpack(state, mine)
    return mine is not None


def _complete(
    job: JobContext, live: Live, state: StateSource, group: Group, origin: str
) -> tuple[str, dict[str, Any]]:
    """Get what this rank lacks, where a spare may lack nothing; returns where the state comes from,
    and what the event says of it besides: the bytes received.
    """
    copies, size = wanting(job, live, state, group)
    if job.rank in copies:
        job.member.holding.receives()
    if copies:
        _copy(job, state, group, receive=job.rank in copies)
    if job.rank in copies:
        live.feeds.forget()
    if not state.receives:
        return origin, {}
    if job.rank not in copies:
        return "live", {"bytes": size}
    return "peer", {"bytes": sum(tensor.nbytes for tensor in job.state.parts().values())}


def _finish(job: JobContext, number: int, group: Group) -> None:
    """Apply a step that other ranks have applied, if this rank lacks only its reduced totals."""
    reduced = exchange_totals(number, job.state.last, group, job.config.device)
    if job.member.holding.pending == number:
        job.reducer.settle(reduced.samples)
        complete(job, job.current, reduced, late=True)


def wanting(
    job: JobContext, live: Live, state: StateSource, group: Group
) -> tuple[tuple[int, ...], int]:
    """Ranks that need a copy of the state of ``state.source``, once each has got what it lacks of
    the last step; a collective of all that hold the same part, nothing where none of them receives.
    Returns the ranks, and the bytes that came here. Raises GenerationLost.
    """
    claims = job.member.holding.valid
    if live.follower is not None:
        if state.receives:
            live.follower.settle(state.live, job.check)
            claims = live.follower.step >= 0
        live.promoted()
    circle, source = group.holders, state.source
    if source < 0:
        return (), 0
    standings = _compared(job, live, state, circle, claims=claims)
    late = one_behind(standings, source)
    if not late:
        return in_want(standings, source), 0
    size = _retell(job, live, circle, source, applies=job.rank in late)
    return in_want(_compared(job, live, state, circle, claims=claims), source), size


def _compared(
    job: JobContext, live: Live, state: StateSource, circle: Circle, *, claims: bool
) -> dict[int, Standing]:
    """What each rank brings, known to all."""
    held = live.feeds.retained
    mine = Standing(
        receives=state.receives,
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


def _retell(job: JobContext, live: Live, circle: Circle, source: int, *, applies: bool) -> int:
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


def _wire(job: JobContext, circle: Circle) -> torch.device:
    """Where tensors are that ranks send to each other: NCCL sends those of its device."""
    return torch.device(job.config.device if circle.backend == "nccl" else "cpu")


def _share_header(
    header: dict[str, Any], job: JobContext, circle: Circle, source: int
) -> dict[str, Any]:
    data, wire = json.dumps(header).encode() if header else b"", _wire(job, circle)
    size = torch.tensor([len(data)], dtype=torch.int64, device=wire)
    circle.broadcast(size, source)
    length = int(size)
    if not 0 < length <= MAX_SCALAR_BYTES:
        raise GenerationLost(f"a peer announced {length} bytes of a step")
    message = torch.frombuffer(bytearray(data or length), dtype=torch.uint8).to(wire)
    circle.broadcast(message, source)
    return dict(json.loads(message.cpu().numpy().tobytes()))


def _share(part: memoryview | int, circle: Circle, source: int, job: JobContext) -> Tensor:
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
