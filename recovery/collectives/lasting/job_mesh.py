"""The default process group and the device mesh of a job, which user code and torch's own
parallelism hold for as long as the process lives.

torch lets a process group be written in Python, but a mesh has one rank number for each process and
keeps it: the numbers in the mesh are therefore places in a replica, which a process keeps for life.
"""

from __future__ import annotations

from datetime import timedelta
from functools import wraps
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from trainchaos.recovery.collectives.group import Group
from trainchaos.recovery.collectives.lasting import objects
from trainchaos.recovery.collectives.lasting.groups import BACKEND, LastingGroup
from trainchaos.recovery.collectives.lost import require_no_group
from trainchaos.recovery.collectives.reduce import Reducer
from trainchaos.recovery.policy.mesh import DIMS, Mesh

NAMES = ("replicate", *DIMS)
"""Dimensions of the mesh. ``replicate`` has one place: the job itself keeps replicas alike, and how
many there are changes. Its group has them all."""

_c10d: Any = dist.distributed_c10d
_set_up_as_torch_does: Any = DeviceMesh._setup_world_group_and_device


class JobGroups:
    """``default``: the default process group; ``mesh``: of the dimensions ``NAMES``, made once the
    place of this process is known, whose groups follow the generations; ``reducer``: by which what
    goes over them is waited for.

    Raises RuntimeError where the process has a default group already.
    """

    def __init__(
        self, mesh: Mesh, cell: int, *, rank: int, world: int, reducer: Reducer, device: str
    ) -> None:
        require_no_group()
        place = mesh.place(cell)
        self._groups: dict[str, LastingGroup] = {
            "replicate": LastingGroup(0, 1, "replicate", reducer)
        }
        for dim in DIMS:
            self._groups[dim] = LastingGroup(getattr(place, dim), mesh.size(dim), dim, reducer)
        self.default = LastingGroup(rank, world, "everyone", reducer)
        _become_default(self.default)
        _register(self._groups["replicate"], f"{BACKEND}-replicate", [rank])
        for dim in DIMS:
            ranks = [rank - cell + each for each in mesh.line(cell, dim)]
            _register(self._groups[dim], f"{BACKEND}-{dim}", ranks)
        places = torch.arange(mesh.cells).view(1, *(mesh.size(dim) for dim in DIMS))
        _number_by_place(cell)
        self.mesh = DeviceMesh.from_group(
            list(self._groups.values()),
            torch.device(device).type,
            mesh=places,
            mesh_dim_names=NAMES,
        )

    def join(self, group: Group) -> None:
        """The groups are connected in this generation."""
        for each in (self.default, *self._groups.values()):
            each.join(group)

    def leave(self) -> None:
        """They are not, until the next."""
        for each in (self.default, *self._groups.values()):
            each.leave()

    def away(self, is_so: bool) -> None:
        for each in (self.default, *self._groups.values()):
            each.away(is_so)

    def end(self) -> None:
        """They never are again."""
        for each in (self.default, *self._groups.values()):
            each.end()


def _become_default(group: LastingGroup) -> None:
    made = [group]

    def create(_store: object, _rank: int, _size: int, _timeout: object) -> LastingGroup:
        if not made:
            _refuse_new_group()
        return made.pop()

    dist.Backend.register_backend(BACKEND, create, devices=["cpu", "cuda"])
    dist.init_process_group(
        BACKEND, store=dist.HashStore(), rank=group.rank(), world_size=group.size()
    )
    _c10d._world.pg_map[group] = (BACKEND, _NoStore())
    objects.teach()


def _register(group: LastingGroup, name: str, ranks: list[int]) -> None:
    """Make it known to torch, as ``new_group`` does, without a store."""
    world = _c10d._world
    world.pg_map[group] = (BACKEND, _NoStore())
    world.pg_names[group] = name
    world.pg_backend_config[group] = BACKEND
    world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    world.pg_to_tag[group] = f"ptd:{name}"
    world.tags_to_pg.setdefault(f"ptd:{name}", []).append(group)
    _c10d._register_process_group(name, group)


def _number_by_place(cell: int) -> None:
    """Let every DeviceMesh of this process take this process for number ``cell``, as long as the
    default group is a job's: a mesh asks for the rank anew whenever a part of it is made, and ranks
    change.
    """

    def get_rank(group: Any = None) -> int:
        return cell if group is None and is_a_jobs() else dist.get_rank(group)

    @wraps(_set_up_as_torch_does)
    def set_up(mesh: DeviceMesh) -> Any:
        if is_a_jobs():
            _refuse_new_group()
        return _set_up_as_torch_does(mesh)

    made_outside: Any = DeviceMesh
    made_outside._setup_world_group_and_device = set_up
    device_mesh.get_rank = get_rank  # type: ignore[attr-defined]


def is_a_jobs() -> bool:
    """Whether the default group is a job's."""
    return dist.is_initialized() and isinstance(_c10d._get_default_group(), LastingGroup)


def _refuse_new_group(*_: object) -> NoReturn:
    raise RuntimeError(
        "torch.distributed made a process group outside the job's mesh (new_group, split_group or"
        " init_device_mesh): it would be gone after the first failure. Use the default group, or"
        " job.mesh.get_group(dim) of one of " + ", ".join(NAMES)
    )


class _NoStore(dist.Store):
    """What a group that the user makes, of any backend, would meet in."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("set", "get", "add", "wait", "check", "compare_set", "delete_key"):
            setattr(self, name, _refuse_new_group)

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing waits."""
