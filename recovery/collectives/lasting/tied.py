"""Parameters that several stages of a pipeline hold, such as an embedding that is also the output
layer's: each stage has a part of their gradient, and all need the sum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainchaos.recovery.collectives.circle import Circle
from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.lasting.traffic import Traffic
from trainchaos.recovery.state.cell import Cell
from trainchaos.recovery.state.parts import is_part, local


class TiedParameters:
    """``shapes``: of all parameters of the whole model, by name; ``held``: those of this stage, the
    live tensors. Used by the training thread.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        held: Mapping[str, torch.nn.Parameter],
        cell: Cell,
        traffic: Traffic,
    ) -> None:
        self._shapes = shapes
        self._held = held
        self._cell = cell
        self._traffic = traffic
        self._told: Group | None = None

    def add_up(self, group: Group) -> None:
        """Sum the gradients over the stages, in place, before anything is reduced; a collective of
        all stages. Raises GenerationLost, RuntimeError where the stages do not make the model.
        """
        circle = group.circle("pipeline")
        if self._told is not group:
            self._tell(circle)
            self._told = group
        for name in self._cell.tied:
            mine = self._held.get(name)
            if mine is not None and mine.grad is not None:
                grad = local(mine.grad)
            else:
                like = next(iter(self._held.values()))
                grad = torch.zeros(self._shapes[name], dtype=like.dtype, device=like.device)
            self._sum(circle, grad)

    def _tell(self, circle: Circle) -> None:
        """Learn which stages hold what."""
        like = next(iter(self._held.values()))
        flags = torch.zeros(len(circle.ranks), len(self._shapes), device=like.device)
        mine = circle.ranks.index(circle.rank)
        flags[mine] = torch.tensor([float(name in self._held) for name in self._shapes])
        self._sum(circle, flags)
        table = circle.read(flags)
        holders = {
            name: [stage for stage, row in enumerate(table) if row[place] > 0]
            for place, name in enumerate(self._shapes)
        }
        gone = next((name for name, stages in holders.items() if not stages), None)
        if gone is not None:
            raise RuntimeError(f"no stage of the pipeline holds parameter {gone}")
        self._cell.tied = tuple(name for name, stages in holders.items() if len(stages) > 1)
        self._cell.firsts = tuple(name for name in self._cell.tied if holders[name][0] == mine)
        for name in self._cell.tied:
            if name in self._held and is_part(self._held[name]):
                raise RuntimeError(
                    f"parameter {name} is held by stages {holders[name]} and spread over the ranks"
                    " of each, which is not served: leave it whole, or untie it"
                )

    def _sum(self, circle: Circle, tensor: Tensor) -> None:
        self._traffic.exchange(
            circle,
            2 * tensor.nbytes,
            lambda made: made.allreduce([tensor]),
            sent=[tensor],
            got=[tensor],
        )
