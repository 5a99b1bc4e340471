"""Averages gradients so that the result is the same, bit for bit, however many ranks there are.

The global batch is cut into as many micro-batches as the full job has ranks. A rank computes the
gradients of each of its own into buffers of their own. Each rank then gets one slice of every
micro-batch's gradients (all-to-all), adds them up in the order of the micro-batches, and the sums
are gathered. A ring all-reduce is the same two halves, and with all ranks there the bytes on the
wire are the same too; but it adds in an order that depends on the ranks.

What it costs: while ranks are missing, the others hold gradients of several micro-batches and send
all of them. There is always a second buffer, for the slices that come in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainchaos.recovery.collectives.buckets import check_types
from trainchaos.recovery.collectives.group import Circle, Group
from trainchaos.recovery.collectives.reduce import _FLAGS, NOTHING, Asks, Reduced, Reducer
from trainchaos.recovery.data import order
from trainchaos.recovery.state.finite import Amount


@dataclass(kw_only=True)
class _Exchange:
    """Of one bucket. ``parts``: this rank's slice of each micro-batch's values; ``sent``: is kept
    while it is sent.
    """

    parts: Tensor
    sent: Tensor | None = None
    work: dist.Work | None = None


class ElasticReducer(Reducer):
    """A ``Reducer`` of ``max_world`` micro-batches."""

    def __init__(
        self, model: nn.Module, *, max_world: int, entering: Callable[[int], None]
    ) -> None:
        super().__init__(entering)
        check_types(dict(model.named_parameters()))
        self._parts = max_world
        # any buffer can be cut into slices of one size, as many as there are ranks
        self._padding = max_world - 1
        self.fill(list(model.parameters()), _FLAGS + max_world, self._padding)
        self._rows = [self._buckets]  # the buckets of each micro-batch of this rank
        self._row = 0
        self._exchanges: list[_Exchange] = []

    def new_generation(self, group: Group) -> None:
        own = len(order.share(group.rank, group.world, self._parts))
        abandoned = self._group is not None and self._group.abandoned
        super().new_generation(group)
        del self._rows[own:]
        if abandoned:
            self._rows = [self._make() for _ in self._rows]
        self._rows += [self._make() for _ in range(own - len(self._rows))]
        self._make_exchanges(group.world)

    def _make_exchanges(self, world: int) -> None:
        self._exchanges = [
            _Exchange(
                parts=bucket.flat.new_empty(self._parts, -(-self._used(bucket.flat) // world))
            )
            for bucket in self._rows[0]
        ]

    def _refill(self) -> None:
        super()._refill()
        self._rows = [self._buckets, *(self._make() for _ in self._rows[1:])]
        self._make_exchanges(self._joined().world)

    def begin(self) -> None:
        self._open(0)

    def expect(self, *, last: bool = True) -> None:
        super().expect(last=last)
        self._armed = last and self._row + 1 == len(self._rows)

    def keep(self, *, rank: int, loss_sum: Amount, count: int) -> None:
        self._take_all()
        if self._row + 1 >= len(self._rows):
            raise RuntimeError(
                f"this rank has {len(self._rows)} micro-batches, and all are computed"
            )
        for bucket in self._buckets[:-1]:
            self._flaws.look(bucket.gradients)
        self._seal(rank, loss_sum, count)
        self._open(self._row + 1)

    def finish(self, *, rank: int, loss_sum: Amount, count: int, asks: Asks = NOTHING) -> Reduced:
        if self._row + 1 < len(self._rows):
            raise RuntimeError(
                f"micro-batch {self._row + 1} of {len(self._rows)} is not this rank's last"
            )
        self._take_all()
        while self._next < len(self._buckets) - 1:
            self._launch()
        self._seal_last(rank, loss_sum, count, asks)
        self._launch()
        self._add_up()
        return self._conclude()

    def _used(self, flat: Tensor) -> int:
        return flat.numel() - self._padding

    def _open(self, row: int) -> None:
        """Get ready for the backward pass of this rank's micro-batch of that place."""
        self._row = row
        self._buckets = self._rows[row]
        passes = self._passes
        super().begin()
        self._passes = passes if row else 0

    def _launch(self) -> None:
        place = self._next
        self._next += 1
        bucket, exchange = self._buckets[place], self._exchanges[place]
        if self._next < len(self._buckets):
            self._flaws.look(bucket.gradients)
        circle = self._joined().everyone
        for own in self._rows:
            own[place].seal()
        world, size = len(circle.ranks), exchange.parts.shape[1]
        rows = [row[place].flat[: world * size] for row in self._rows]
        sent = rows[0]
        if len(rows) > 1:
            sent = torch.stack([row.view(world, size) for row in rows], dim=1).flatten()
        exchange.sent = sent
        coming = [len(order.share(rank, world, self._parts)) * size for rank in range(world)]
        going = [len(rows) * size] * world
        exchange.work = self.enter(
            sent.nbytes,
            circle.ranks,
            lambda: circle.start(
                lambda made: made.alltoall_base(exchange.parts.view(-1), sent, coming, going)
            ),
        )

    def _add_up(self) -> None:
        """Wait for the slices, add them up in the order of the micro-batches, and put the sums
        together.
        """
        circle = self._joined().everyone
        gathers = []
        for bucket, exchange in zip(self._buckets, self._exchanges, strict=True):
            circle.wait(exchange.work)
            bucket.require_sealed()
            exchange.sent = None
            total, *others = exchange.parts.unbind()
            for part in others:
                total.add_(part)
            gathers.append(
                self._gather(circle, bucket.flat[: len(circle.ranks) * total.numel()], total)
            )
        for gather in gathers:
            circle.wait(gather)

    def _gather(self, circle: Circle, whole: Tensor, own: Tensor) -> dist.Work | None:
        return self.enter(
            whole.nbytes,
            circle.ranks,
            lambda: circle.start(lambda made: made._allgather_base(whole, own)),
        )
