"""What is used of torch that is private is there, under this torch; docs/torch.md says why each is
used and what to do when it has moved.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.data
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, _utils
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp

from trainchaos.recovery.collectives import sharding

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "torch.md"
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
PUBLIC: Any = dist
C10D: Any = dist.distributed_c10d
LIBRARY: Any = torch._C._distributed_c10d
NORM: Any = nn.BatchNorm1d(2)
OF_STATE = ("_comm_ctx", "_state_ctx", "_modules_to_run_forward", "_training_state")
OF_GROUP = (
    "_all_gather_result",
    "_reshard_after_forward_event",
    "_post_reduce_event",
    "_all_reduce_state",
    "_partial_reduce_output",
    "_post_forward_indices",
    "_to_sharded",
)
NOT_TORCH = {
    "_asdict": "of named tuples",
    "_getframe": "of sys",
    "_set_pg_timeout": "an example's, for torchtitan; set_timeout since 2.14",
    "_should_save": "torchtitan's",
    "_shm_handler": "DLRover's",
}


def counts_writes() -> bool:
    """In place, and through a view."""
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    tensor.view(-1)[0] = 2
    return tensor._version == before + 2


def sharded() -> Any:
    """A layer that ``fully_shard`` has taken, as the only rank."""
    layer = nn.Linear(2, 2)
    try:
        fully_shard(layer, mesh=sharding._mesh(1, "cpu"))
        layer(torch.ones(1, 2)).sum().backward()
    finally:
        dist.destroy_process_group()
    return layer


def has_options() -> bool:
    """With the fields that are set."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._threads, options._devices = 2, []
    return hasattr(options, "_timeout") and hasattr(options, "group_name")


def parameter_of(layer: Any) -> Any:
    """What torch keeps of a sharded parameter."""
    return group_of(layer).fsdp_params[0]


def state_of(layer: Any) -> Any:
    """What torch keeps of a sharded module."""
    return layer._get_fsdp_state()


def group_of(layer: Any) -> Any:
    """What torch keeps of parameters that are gathered together."""
    state = layer._get_fsdp_state()
    several = hasattr(state, "_fsdp_param_groups")
    return state._fsdp_param_groups[0] if several else state._fsdp_param_group


def is_reset(owner: Callable[[Any], Any], name: str) -> Callable[[], bool]:
    """A tracker of a sharded model's passes that is reset by name before torch 2.13."""
    return lambda: VERSION >= (2, 13) or hasattr(owner(sharded()), name)


def takes(function: Any, *names: str) -> bool:
    """Whether its first parameters are called so."""
    return tuple(inspect.signature(function).parameters)[: len(names)] == names


def world_has(*names: str) -> bool:
    """Tables of torch's in which a group is registered."""
    return all(isinstance(getattr(C10D._world, name), dict) for name in names)


NAMES: dict[str, Callable[[], bool]] = {
    "Tensor._version": counts_writes,
    "DTensor._local_tensor": lambda: "_local_tensor" in DTensor.__annotations__,
    "Module._parameters": lambda: [*NORM._parameters] == ["weight", "bias"],
    "Module._buffers": lambda: "running_mean" in NORM._buffers,
    "Module._non_persistent_buffers_set": lambda: NORM._non_persistent_buffers_set == set(),
    "Module._state_dict_pre_hooks": lambda: len(NORM._state_dict_pre_hooks) == 0,
    "distributed_c10d._get_default_group": lambda: takes(C10D._get_default_group),
    "distributed_c10d._world": lambda: world_has(
        "pg_map", "pg_names", "pg_backend_config", "pg_group_ranks", "pg_to_tag", "tags_to_pg"
    ),
    "distributed_c10d._register_process_group": lambda: callable(C10D._register_process_group),
    "distributed_c10d._object_to_tensor": lambda: takes(
        C10D._object_to_tensor, "obj", "device", "group"
    ),
    "distributed_c10d._tensor_to_object": lambda: takes(
        C10D._tensor_to_object, "tensor", "tensor_size", "group"
    ),
    "distributed_c10d._get_object_coll_device": lambda: takes(
        C10D._get_object_coll_device, "group"
    ),
    "_C._distributed_c10d._create_work_from_future": lambda: callable(
        LIBRARY._create_work_from_future
    ),
    "_C._distributed_c10d._dump_fr_trace_json": lambda: callable(LIBRARY._dump_fr_trace_json),
    "_C._distributed_c10d._dump_nccl_trace_json": lambda: (
        not dist.is_nccl_available() or callable(LIBRARY._dump_nccl_trace_json)
    ),
    "ProcessGroupGloo._Options": has_options,
    "ProcessGroup._allgather_base": lambda: callable(dist.ProcessGroup._allgather_base),
    "ProcessGroup._reduce_scatter_base": lambda: callable(dist.ProcessGroup._reduce_scatter_base),
    "ProcessGroup._set_default_timeout": lambda: callable(
        dist.ProcessGroupGloo._set_default_timeout
    ),
    "DeviceMesh._setup_world_group_and_device": lambda: (
        takes(DeviceMesh._setup_world_group_and_device, "self") and bool(device_mesh.get_rank)
    ),
    "nn.parallel.distributed._get_default_group": lambda: callable(ddp._get_default_group),
    "DistributedDataParallel._comm_hooks": lambda: (
        "self._comm_hooks" in inspect.getsource(DistributedDataParallel.__init__)
    ),
    "DistributedDataParallel._get_ddp_logging_data": lambda: takes(
        DistributedDataParallel._get_ddp_logging_data, "self"
    ),
    "Reducer._rebuild_buckets": lambda: callable(dist.Reducer._rebuild_buckets),
    "FSDPModule._get_fsdp_state": lambda: bool(sharded()._get_fsdp_state()),
    "FSDPState._fsdp_param_groups": lambda: (
        VERSION < (2, 13) or len(sharded()._get_fsdp_state()._fsdp_param_groups) == 1
    ),
    "FSDPState._fsdp_param_group": lambda: bool(group_of(sharded())),
    "FSDPState._is_root": lambda: sharded()._get_fsdp_state()._is_root is True,
    "FSDPParam._unsharded_param": lambda: bool(
        hasattr(parameter_of(sharded()), "_unsharded_param")
    ),
    "FSDPParam.unsharded_accumulated_grad": lambda: (
        VERSION >= (2, 15) or "unsharded_accumulated_grad" in vars(parameter_of(sharded()))
    ),
    **{f"FSDPState.{name}": is_reset(state_of, name) for name in OF_STATE},
    **{f"FSDPParamGroup.{name}": is_reset(group_of, name) for name in OF_GROUP},
    "tensor._utils.compute_local_shape_and_global_offset": lambda: takes(
        _utils.compute_local_shape_and_global_offset, "global_shape", "mesh", "placements"
    ),
    "distributed._reconfigure": lambda: (
        VERSION < (2, 14) or takes(PUBLIC._reconfigure, "uuid", "handles", "group", "timeout")
    ),
    "distributed._get_reconfigure_handle": lambda: (
        VERSION < (2, 14) or takes(PUBLIC._get_reconfigure_handle, "group")
    ),
    "torch._dynamo": lambda: bool(__import__("torch._dynamo")),
    "DataLoader._iterator": lambda: hasattr(torch.utils.data.DataLoader([1]), "_iterator"),
    "_BaseDataLoaderIter._timeout": lambda: (
        "_timeout" in inspect.getsource(torch.utils.data.dataloader._BaseDataLoaderIter)
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_private_name_of_torch_is_where_it_was(name: str) -> None:
    assert NAMES[name](), f"{name} has moved: docs/torch.md says what to do"


def test_the_page_lists_each_private_name() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", PAGE.read_text(), re.MULTILINE)
    assert re.findall(r"`([^`]+)`", " ".join(rows)) == [*NAMES]


def test_no_other_private_name_of_torch_is_used() -> None:
    trees = {
        path: ast.parse(path.read_text())
        for room in ("recovery", "chaos", "harness", "benchmarks", "examples")
        for path in sorted((ROOT / room).rglob("*.py"))
    }
    ours = {name for tree in trees.values() for name in defined(tree)}
    known = {name.rpartition(".")[2] for name in NAMES} | {*NOT_TORCH}
    known |= {part for name in NAMES for part in name.split(".")}
    unknown = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, tree in trees.items()
        if "torch" in path.read_text()
        for name, line in private(tree)
        if name not in ours and name not in known
    ]
    assert not unknown, "list it in docs/torch.md, with a test"


def defined(tree: ast.Module) -> set[str]:
    """Names that a module defines, and fields that its classes have."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def private(tree: ast.Module) -> list[tuple[str, int]]:
    """Private attributes of others, and private modules and names that are imported of torch."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                found.append((node.attr, node.lineno))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            words = [*(node.module or "").split("."), *(name.name for name in node.names)]
            found += [(word, node.lineno) for word in words if word.startswith("_")]
    return found
