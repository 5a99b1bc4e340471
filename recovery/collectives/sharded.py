"""Reduces the gradients of a sharded model: within a replica part by part, then over the replicas,
shard by shard.

``fully_shard`` sums a unit's gradients over the ranks of the replica and adds this rank's part to
buckets that do not depend on a generation; each is then summed over the ranks that hold the same
part, overlapping backward as in ``reduce``. One small all-reduce over all ranks ends the step: a
gradient norm over all parts needs it anyway, and it carries what the tail of a bucket carries in
data-parallel training.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainchaos.recovery.collectives.group import Circle, GenerationLost, Group
from trainchaos.recovery.collectives.reduce import Buckets
from trainchaos.recovery.collectives.reducer import Reduced
from trainchaos.recovery.collectives.sharding import reset
from trainchaos.recovery.state.finite import Amount, NonFiniteCheck

_SQUARES, _LOSS, _COUNT, _PAUSE, _SAVE, _FLAGS = range(6)


class ShardedReducer(Buckets):
    """A ``Reducer`` and the model's ``ShardExchange``. ``waiting``: called before (True) and after
    (False) each collective in the midst of a pass.
    """

    def __init__(
        self, model: nn.Module, *, entering: Callable[[int], None], waiting: Callable[[bool], None]
    ) -> None:
        super().__init__(entering)
        self._model = model
        self._waiting = waiting
        self._underway = False  # in a forward or backward pass
        self._complete = False  # the buckets hold what all ranks summed
        self._settled = False
        self._sent = NonFiniteCheck()  # of each unit's own gradients
        self._got = NonFiniteCheck()  # and of what the replica made of them

    def adopt(self) -> None:
        """The model is sharded now: make buckets for this rank's parts."""
        self.fill(list(self._model.parameters()))

    def new_generation(self, group: Group) -> None:
        """See Reducer."""
        if self._complete and self._group is not None and self._group.abandoned:
            self._group = None  # what is abandoned is not a bucket's operation
        super().new_generation(group)

    def begin(self) -> None:
        """See Reducer."""
        self._complete = self._settled = False
        self._underway = True
        self._sent.clear()
        self._got.clear()
        super().begin()
        if not self._buckets:  # not sharded yet
            self._model.zero_grad()

    def _refill(self) -> None:
        raise RuntimeError(
            "parameters of a sharded model were frozen or unfrozen while it trains: do so before"
            " job.attach"
        )

    def gather(self, output: Tensor, part: Tensor) -> None:
        """See Exchange."""
        self._exchange(output.nbytes, lambda made: made._allgather_base(output, part))

    def reduce_scatter(self, output: Tensor, whole: Tensor) -> None:
        """See Exchange."""
        # Looked at before it is mixed with the others' values: that is how the rank to blame is
        # known.
        self._sent.look(whole)
        shard = self._joined().shard
        if shard.backend == "nccl":
            self._exchange(whole.nbytes, lambda made: made._reduce_scatter_base(output, whole))
        else:
            # Gloo's own is an all-reduce of everything, and a wait for it knows no time limit: an
            # abort would not always end it.
            parts, options = torch.empty_like(whole), dist.AllToAllOptions()
            self._exchange(
                whole.nbytes, lambda made: made.alltoall_base(parts, whole, [], [], options)
            )
            torch.sum(parts.view(len(shard.ranks), -1), dim=0, out=output)
        self._got.look(output)

    def finish(
        self, *, rank: int, loss_sum: Amount, count: int, pause: bool, save: bool = False
    ) -> Reduced:
        """See Reducer."""
        self._underway = False
        self._take_all()
        while self._next < len(self._buckets) - 1:
            self._launch()
        self._flaws.look(self._buckets[-1].gradients)
        self._launch()
        self._sent.look(loss_sum)
        # What is not finite here and was when the replica was done with it, this rank has spoilt
        # itself.
        bad = self._sent.flag() + self._flaws.flag() * (1 - self._got.flag())
        circle = self._circle()
        for bucket in self._buckets:
            circle.wait(bucket.work)
            bucket.require_sealed()
        word = self._last_word(rank, [loss_sum, count, float(pause), float(save)], bad)
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
            pause=word[_PAUSE] > 0,
            save=word[_SAVE] > 0,
            blamed=blamed,
            grad_norm=math.sqrt(word[_SQUARES]) / samples,
        )

    def settle(self, samples: Amount) -> None:
        """See Reducer."""
        if not self._settled:
            self._settled = True
            super().settle(samples)

    def broken_off(self) -> bool:
        """See Reducer."""
        super().broken_off()
        if self._underway and self._buckets:
            reset(self._model)
        self._underway = False
        return self._complete

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say yes. Raises GenerationLost."""
        everyone = self._joined().everyone
        said = torch.tensor([float(yes)], device=self._buckets[0].flat.device)
        everyone.wait(everyone.start_all_reduce(said, dist.ReduceOp.MIN))
        return bool(everyone.read(said)[0])

    def _last_word(self, rank: int, values: list[Amount], bad: Amount) -> list[float]:
        group = self._joined()
        flat = self._buckets[0].flat
        word = torch.zeros(_FLAGS + group.world, dtype=torch.float64, device=flat.device)
        if group.layout.replica_of(rank) == 0:  # the other replicas hold the same sums
            word[_SQUARES] = self._norms().double().square().sum()
        for place, value in enumerate(values, start=_LOSS):
            word[place] = value
        word[_FLAGS + rank] = self._with_start(bad)
        # A rank that completes this collective knows that all have come this far. One that does not
        # may have missed a step that others apply, and holds all that is needed to follow.
        self._complete = True
        everyone = group.everyone
        everyone.wait(
            self._enter(2 * word.nbytes, group.ranks, lambda: everyone.start_all_reduce(word))
        )
        return self._read(word)

    def _circle(self) -> Circle:
        return self._joined().holders

    def _exchange(self, ring_bytes: int, operation: Callable[[Any], dist.Work]) -> None:
        if self.check:
            self.check()
        circle = self._joined().shard
        self._waiting(True)
        circle.wait(self._enter(ring_bytes, circle.ranks, lambda: circle.start(operation)))
        self._waiting(False)
