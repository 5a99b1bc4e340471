"""How a rank that joins a generation gets its state: it keeps its own, copies a peer's, or restores
a checkpoint.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.checkpoint import own
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.transfer import copy_state
from trainchaos.recovery.rank.complete_step import complete, exchange_totals
from trainchaos.recovery.rank.promotion import wanting
from trainchaos.recovery.spares.live import Live
from trainchaos.recovery.transport.wire import Join

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import Job


def take_state(job: Job, order: Join, group: Group) -> str | None:
    """Get the generation's state; returns the checkpoint's name if this rank restored one. Raises
    GenerationLost, and NothingToRestore when nothing can bring the state back.
    """
    holding, layout, rank = job.member.holding, job.layout, job.rank
    if order.finish:
        _finish(job, order.finish, group)
    job.state.attempt.undo()
    kept = _own_before(job, order)
    started = time.perf_counter()
    name: str | None = None
    origin = "kept" if job.state.step else "initial"
    if job.live is not None and job.live.brings:
        origin = "live"
    if order.restore and (rank == 0 or layout.shards > 1):
        holding.restores()
        name = job.checkpoints.restore(group, layout)
        found = name is not None
        if order.receives:
            name = None  # this rank gets a copy of what another rank loads
        elif name is None:
            job.checkpoints.require(anew=order.anew, fresh=holding.fresh)
        origin = "checkpoint" if name else "initial"
        holding.restored(found=found)
    extra: dict[str, Any] = {}
    if order.live >= 0 and job.live is not None:
        origin, extra = _complete(job, job.live, order, group, origin)
    else:
        if order.receives:
            holding.receives()
            origin = "peer"
        if order.source >= 0:
            _copy(job, order, group, receive=order.receives)
    if _take_own(job, kept) or (order.restore and origin == "peer"):
        extra["own"] = True
    holding.valid = True
    job.write(
        Kind.STATE_READY,
        step=job.state.step,
        rank=rank,
        origin=origin,
        source=order.source if origin in ("peer", "live") else name,
        seconds=round(time.perf_counter() - started, 6),
        **extra,
    )
    return name


def _copy(job: Job, order: Join, group: Group, *, receive: bool) -> None:
    copy_state(
        job.state,
        group.holders,
        source=order.source,
        receive=receive,
        feeds=order.feeds if order.direct else None,
        progress=job.marks.touch,
        device=job.config.device,
    )


def _own_before(job: Job, order: Join) -> tuple[int, Tensor] | None:
    """What this rank is to keep of its own although it copies a peer's state, and its step: it has
    left for a value that was not finite.
    """
    if not order.receives or order.restore or not job.member.holding.retries:
        return None
    return job.state.step, own.packed(job.state)


def _take_own(job: Job, kept: tuple[int, Tensor] | None) -> bool:
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
    job: Job, live: Live, order: Join, group: Group, origin: str
) -> tuple[str, dict[str, Any]]:
    """Get what this rank lacks, where a spare may lack nothing; returns where the state comes from,
    and what the event says of it besides: the bytes received.
    """
    copies, size = wanting(job, live, order, group)
    if job.rank in copies:
        job.member.holding.receives()
    if copies:
        _copy(job, order, group, receive=job.rank in copies)
    if job.rank in copies:
        live.feeds.forget()
    if not order.receives:
        return origin, {}
    if job.rank not in copies:
        return "live", {"bytes": size}
    return "peer", {"bytes": sum(tensor.nbytes for tensor in job.state.parts().values())}


def _finish(job: Job, number: int, group: Group) -> None:
    """Apply a step that other ranks have applied, if this rank lacks only its reduced totals."""
    reduced = exchange_totals(number, job.state.last, group, job.config.device)
    if job.member.holding.pending == number:
        job.reducer.settle(reduced.samples)
        complete(job, job.current, reduced, late=True)
