"""Objects that ranks of a job exchange by torch's object collectives: as JSON of typed values,
where torch would unpickle what other ranks send.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainchaos.recovery.collectives.lasting.groups import LastingGroup
from trainchaos.recovery.state import typed

_c10d: Any = dist.distributed_c10d
_NOT_SENT = ("!enum", "!code")  # of which the receiver would need its own


def teach() -> None:
    """Have torch's object collectives call this for groups of a job, and its own for others."""
    _c10d._object_to_tensor = _for_jobs(_c10d._object_to_tensor, _to_tensor)
    _c10d._tensor_to_object = _for_jobs(_c10d._tensor_to_object, _to_object)
    _c10d._get_object_coll_device = _for_jobs(_c10d._get_object_coll_device, _device)


def _for_jobs(original: Any, instead: Callable[..., Any]) -> Any:
    if getattr(original, "of_jobs", False):
        return original

    def either(*given: Any, **named: Any) -> Any:
        group = named.get("group", given[-1] if given else None) or _c10d._get_default_group()
        return (instead if isinstance(group, LastingGroup) else original)(*given, **named)

    either.of_jobs = True  # type: ignore[attr-defined]
    return either


def _to_tensor(value: Any, device: Any, group: Any) -> tuple[Tensor, Tensor]:
    """The bytes of ``value`` and their number. Raises TypeError for what has no typed form."""
    try:
        form = json.dumps(_checked(typed.encode(value, "the object")))
    except TypeError as error:
        called = sys._getframe(2).f_code.co_name
        raise TypeError(
            f"torch.distributed.{called}: {error} (no rank of a job unpickles what another sends; a"
            " PipelineStage needs no such exchange if it is given its input_args and output_args)"
        ) from None
    data = torch.frombuffer(bytearray(form.encode()), dtype=torch.uint8).to(device)
    return data, torch.tensor([data.numel()], dtype=torch.int64, device=device)


def _to_object(tensor: Tensor, size: Any, group: Any) -> Any:
    """Tensors in it are on the CPU. Raises ValueError for what is no object of ``_to_tensor``."""
    raw = tensor.cpu().numpy().tobytes()[: int(size)]
    return typed.decode(json.loads(raw))


def _device(group: Any = None) -> str:
    return (group or _c10d._get_default_group()).object_device  # type: ignore[no-any-return]


def _checked(form: Any) -> Any:
    if isinstance(form, dict):
        if form.keys() & set(_NOT_SENT) and len(form) == 1:
            (what,) = form.values()
            raise TypeError(f"{what!r} in the object is code or a member of an Enum: send its name")
        for part in form.values():
            _checked(part)
    elif isinstance(form, list):
        for part in form:
            _checked(part)
    return form
