"""Parameters that several stages of a pipeline hold, such as an embedding that is also the output
layer's: each stage has a part of their gradient, and all need the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from trainchaos.recovery.collectives.group import Circle, Group
from trainchaos.recovery.state.cell import Cell
from trainchaos.recovery.state.parts import is_part, local


class TiedParameters:
    """``names``: of all parameters of the whole model; ``held``: those of this stage, the live
    tensors; ``exchange``: the method of ``Reducer``. Used by the training thread.
    """

    def __init__(
        self,
        names: Sequence[str],
        held: Mapping[str, torch.nn.Parameter],
        cell: Cell,
        exchange: Callable[..., None],
    ) -> None:
        self._names = names
        self._held = held
        self._cell = cell
        self._exchange = exchange
        self._told: Group | None = None
        self._sizes: dict[str, int] = {}

    def add_up(self, group: Group) -> None:
        """Sum the gradients over the stages, in place, before anything is reduced; a collective of
        all stages. Raises GenerationLost, RuntimeError where the stages do not make the model.
        """
        circle = group.circle("pipeline")
        if self._told is not group:
            self._sizes = self._tell(circle)
            self._told = group
        for name, size in self._sizes.items():
            mine = self._held.get(name)
            if mine is not None and mine.grad is not None:
                grad = local(mine.grad)
            else:
                like = next(iter(self._held.values()))
                grad = torch.zeros(size, dtype=like.dtype, device=like.device)
            self._sum(circle, grad)

    def _tell(self, circle: Circle) -> dict[str, int]:
        """Learn which stages hold what; returns how much of each tied parameter a rank holds."""
        like = next(iter(self._held.values()))
        said = [_described(self._held.get(name)) for name in self._names]
        table = torch.zeros(len(circle.ranks), len(said), 2, dtype=torch.float64).to(like.device)
        mine = circle.ranks.index(circle.rank)
        table[mine] = torch.tensor(said, dtype=torch.float64)
        self._sum(circle, table)
        flat = circle.read(table.view(-1))
        sizes, firsts = {}, []
        for place, name in enumerate(self._names):
            at = [2 * (stage * len(said) + place) for stage in range(len(circle.ranks))]
            found = {stage: flat[i : i + 2] for stage, i in enumerate(at) if flat[i + 1] > 0}
            if not found:
                raise RuntimeError(f"no stage of the pipeline holds parameter {name}")
            if len(found) == 1:
                continue
            if len({tuple(each) for each in found.values()}) > 1:
                raise RuntimeError(
                    f"parameter {name} is held by stages {[*found]}, which have spread it over"
                    " their ranks in different ways: spread it alike, or untie it"
                )
            sizes[name] = int(next(iter(found.values()))[0])
            if next(iter(found)) == mine:
                firsts.append(name)
        self._cell.tied, self._cell.firsts = tuple(sizes), tuple(firsts)
        return sizes

    def _sum(self, circle: Circle, tensor: Tensor) -> None:
        self._exchange(
            circle,
            2 * tensor.nbytes,
            lambda made: made.allreduce([tensor]),
            sent=[tensor],
            got=[tensor],
        )


def _described(held: torch.nn.Parameter | None) -> tuple[int, int]:
    """How much this rank holds of a parameter, and a number of how it is spread, 0 if it is not
    held at all.
    """
    if held is None:
        return 0, 0
    whole: Any = held
    spread = f"{whole.device_mesh.shape} {whole.placements}" if is_part(held) else "whole"
    return local(held).numel(), 1 + crc32(f"{spread} {tuple(local(held).shape)}".encode())
