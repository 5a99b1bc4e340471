"""Reduces the gradients of a model that several ranks hold together: within a replica part by part,
then over all that hold the same part, which are the replicas and, in each, the ``context`` ranks.

``fully_shard`` sums a unit's gradients over the ranks of the replica and adds this rank's part to
buckets that do not depend on a generation; each is then summed over the ranks that hold the same
part, overlapping backward as in ``reduce``. One small all-reduce over all ranks ends the step: a
gradient norm over all parts needs it anyway, and it carries what the tail of a bucket carries in
data-parallel training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainchaos.recovery.collectives.group import Circle, GenerationLost, Group
from trainchaos.recovery.collectives.reduce import (
    NOTHING,
    Asks,
    Reduced,
    Reducer,
    heard,
)
from trainchaos.recovery.collectives.sharding import reset
from trainchaos.recovery.collectives.tied import TiedParameters
from trainchaos.recovery.state.cell import Cell
from trainchaos.recovery.state.finite import Amount, NonFiniteCheck
from trainchaos.recovery.state.naming import named_parameters
from trainchaos.recovery.state.parts import local

_SQUARES, _LOSS, _COUNT, _ASKS = range(4)
_FLAGS = _ASKS + len(NOTHING)


class ShardedReducer(Reducer):
    """It is the model's ``ShardExchange`` too."""

    def __init__(self, model: nn.Module, *, entering: Callable[[int], None]) -> None:
        super().__init__(entering)
        self._model = model
        self._underway = False  # in a forward or backward pass
        self._complete = False  # the buckets hold what all ranks summed
        self._settled = False
        self._sent = NonFiniteCheck()  # of each unit's own gradients
        self._got = NonFiniteCheck()  # and of what the replica made of them
        self._came = NonFiniteCheck()  # of what this rank computes with
        self._guilt: Amount = 0.0  # sent something not finite before any had come
        self._cell: Cell | None = None
        self._tied: TiedParameters | None = None

    def adopt(
        self,
        model: nn.Module | None = None,
        cell: Cell | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """The model is cut up now: make buckets for this rank's parts. ``model``: another than
        before, where this rank has a stage; ``cell``: where ranks compute the same samples;
        ``names``: of all parameters of the whole model, some of which several stages may hold.
        """
        self._model = model or self._model
        self._cell = cell
        self.fill(list(self._model.parameters()))
        if cell is not None and cell.partial:
            self._tied = TiedParameters(names, named_parameters(self._model), cell, self.exchange)

    def new_generation(self, group: Group) -> None:
        if self._complete and self._group is not None and self._group.abandoned:
            self._group = None  # what is abandoned is not a bucket's operation
        super().new_generation(group)

    def begin(self) -> None:
        self._complete = self._settled = False
        self._underway = True
        self._sent.clear()
        self._got.clear()
        self._came.clear()
        self._guilt = 0.0
        super().begin()
        if not self._buckets:  # not sharded yet
            self._model.zero_grad()

    def _refill(self) -> None:
        raise RuntimeError(
            "parameters of a sharded model were frozen or unfrozen while it trains: do so before"
            " job.attach"
        )

    def gather(self, output: Tensor, part: Tensor) -> None:
        shard = self._joined().circle("shard")
        self.exchange(shard, output.nbytes, lambda made: made._allgather_base(output, part))

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        # Looked at before it is mixed with the others' values: that is how the rank to blame is
        # known.
        self._offer(whole)
        shard = self._joined().circle("shard")
        if shard.backend == "nccl":
            self.exchange(
                shard, whole.nbytes, lambda made: made._reduce_scatter_base(output, whole)
            )
        else:
            # Gloo's own is an all-reduce of everything, and a wait for it knows no time limit: an
            # abort would not always end it.
            parts, options = torch.empty_like(whole), dist.AllToAllOptions()
            self.exchange(
                shard, whole.nbytes, lambda made: made.alltoall_base(parts, whole, [], [], options)
            )
            torch.sum(parts.view(len(shard.ranks), -1), dim=0, out=output)
        self._got.look(output)
        self._came.look(output)  # stages may have to add it up, too

    def finish(self, *, rank: int, loss_sum: Amount, count: int, asks: Asks = NOTHING) -> Reduced:
        self._take_all()
        if self._tied is not None:
            self._tied.add_up(self._joined())
        self._underway = False
        while self._next < len(self._buckets) - 1:
            self._launch()
        self._flaws.look(self._buckets[-1].gradients)
        self._launch()
        self._offer(loss_sum)
        # What is not finite here and was when the replica was done with it, this rank has spoilt
        # itself.
        own = self._flaws.flag() * (1 - self._got.flag()) * (1 - self._came.flag())
        bad = self._sent.flag() + self._guilt + own
        if self._cell is not None:
            mesh = self._cell.mesh
            loss_sum = loss_sum if mesh.says_loss(rank) else 0.0
            count = count if mesh.leads(rank) else 0
        circle = self._circle()
        for bucket in self._buckets:
            circle.wait(bucket.work)
            bucket.require_sealed()
        word = self._last_word(rank, [loss_sum, count, *map(float, asks)], bad)
        try:
            blamed = self._blamed(word[_FLAGS:])
        except GenerationLost:
            self._complete = False  # no rank applies it
            raise
        samples = round(word[_COUNT])
        self.settle(samples)
        return Reduced(
            loss=word[_LOSS] / samples,
            samples=samples,
            asks=heard(word[_ASKS:_FLAGS]),
            blamed=blamed,
            grad_norm=math.sqrt(word[_SQUARES]) / samples,
        )

    def settle(self, samples: Amount) -> None:
        if not self._settled:
            self._settled = True
            super().settle(samples)

    def broken_off(self) -> bool:
        super().broken_off()
        if self._underway and self._buckets:
            reset(self._model)
        self._underway = False
        return self._complete

    def _last_word(self, rank: int, values: list[Amount], bad: Amount) -> list[float]:
        group = self._joined()
        flat = self._buckets[0].flat
        word = torch.zeros(_FLAGS + group.world, dtype=torch.float64, device=flat.device)
        if group.layout.replica_of(rank) == 0:  # the other replicas hold the same sums
            word[_SQUARES] = self._squares()
        for place, value in enumerate(values, start=_LOSS):
            word[place] = value
        word[_FLAGS + rank] = bad + self._started
        # A rank that completes this collective knows that all have come this far. One that does not
        # may have missed a step that others apply, and holds all that is needed to follow.
        self._complete = True
        everyone = group.everyone
        self._collectives += self._uneven
        everyone.wait(
            self.enter(2 * word.nbytes, group.ranks, lambda: everyone.start_all_reduce(word))
        )
        return self._read(word)

    def _circle(self) -> Circle:
        return self._joined().same

    def goes(self, sent: Sequence[Tensor]) -> None:
        for tensor in sent if self._underway else ():
            if tensor.is_floating_point():
                self._offer(tensor)

    def came(self, got: Sequence[Tensor]) -> None:
        for tensor in got if self._underway else ():
            if tensor.is_floating_point():
                self._came.look(tensor)

    @property
    def _uneven(self) -> bool:
        """Whether ranks of a replica enter collectives that others of it do not have. Who has
        entered fewer is then not late, so that only whole steps are counted.
        """
        return self._cell is not None and self._cell.partial

    def _count(self) -> None:
        if not self._uneven:
            super()._count()

    def _offer(self, values: Amount) -> None:
        """This rank sends values. It has spoilt those that are not finite, unless it computed them
        with others that were not.
        """
        if self._cell is None:
            self._sent.look(values)
            return
        check = NonFiniteCheck()
        check.look(values)
        guilt = self._guilt + check.flag() * (1 - self._came.flag())
        self._guilt = guilt.clamp(max=1) if isinstance(guilt, Tensor) else min(1.0, guilt)

    def _squares(self) -> Tensor:
        """Of the norm of the gradients that this rank speaks for."""
        cell = self._cell
        if cell is None:
            return self._norms().double().square().sum()
        names = {id(each): name for name, each in named_parameters(self._model).items()}
        norms = [
            torch.linalg.vector_norm(local(view))
            for bucket in self._buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
            if cell.speaks(names[id(parameter)], parameter)
        ]
        none = torch.zeros(1, device=self._buckets[0].flat.device)
        return torch.stack(norms or [none[0]]).double().square().sum()
