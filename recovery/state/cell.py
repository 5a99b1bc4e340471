"""Which cell of a replica speaks for a tensor that several of them hold: it writes it into a
checkpoint, and counts it in the norm of the gradients.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainchaos.recovery.policy.mesh import DIMS, Mesh, Place
from trainchaos.recovery.state.parts import is_part


@dataclass(kw_only=True)
class Cell:
    """``number``: of this process in its replica; ``tied``: parameters that several stages hold;
    ``firsts``: those of them that no earlier stage holds.
    """

    mesh: Mesh
    number: int
    tied: Collection[str] = ()
    firsts: Collection[str] = ()

    @property
    def place(self) -> Place:
        """Its coordinates."""
        return self.mesh.place(self.number)

    @property
    def partial(self) -> bool:
        """Whether other cells hold parameters of which this one holds nothing."""
        return self.mesh.pipeline > 1

    def speaks(self, name: str, tensor: Tensor) -> bool:
        """Whether no other cell of the replica speaks for what this one holds of a tensor of the
        state, or for a parameter by its name. The first of those that hold the same does.
        """
        spread, place = spread_over(tensor), self.place
        if (place.tensor and "tensor" not in spread) or (place.shard and "shard" not in spread):
            return False
        if place.context:  # holds what the first of its line does
            return False
        if name.startswith("user."):  # of job.register: every stage holds all of it
            return not place.pipeline
        whose = next((one for one in self.tied if _belongs(name, one)), None)
        return whose is None or whose in self.firsts


def _belongs(name: str, parameter: str) -> bool:
    """Whether a name is that of a parameter, of its value in the state, or of what the optimizer
    keeps for it.
    """
    return name in (parameter, f"model.{parameter}") or name.startswith(f"optimizer.{parameter}.")


def spread_over(tensor: Tensor) -> set[str]:
    """The dimensions along which ranks hold different parts of a tensor."""
    if not is_part(tensor):
        return set()
    whole: Any = tensor
    mesh = whole.device_mesh
    return {
        _dim(mesh, at)
        for at, placement in enumerate(whole.placements)
        if not placement.is_replicate()
    }


def dims_of(tensor: Tensor) -> set[str]:
    """The dimensions of the mesh that a tensor is on, but for those of one place."""
    if not is_part(tensor):
        return set()
    whole: Any = tensor
    mesh = whole.device_mesh
    return {_dim(mesh, at) for at in range(mesh.ndim) if mesh.size(at) > 1}


def _dim(mesh: Any, at: int) -> str:
    """The job's name of a dimension of a mesh of its groups, which may have other names there."""
    name: str = (mesh.mesh_dim_names or ("",) * (at + 1))[at]
    return name if name in DIMS else str(mesh.get_group(at).name_of_circle)
