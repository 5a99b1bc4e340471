"""Objects that ranks of a job exchange by torch's object collectives: as JSON of typed values,
where torch would unpickle what other ranks send.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from trainchaos.recovery.collectives.lasting.groups import LastingGroup
from trainchaos.recovery.state import typed

_c10d: Any = dist.distributed_c10d
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype)
_MAPPINGS = (dict, OrderedDict, Counter)
_SEQUENCES = (list, tuple, set, deque)


def teach() -> None:
    """Have torch's object collectives call this for groups of a job, and its own for others."""
    _c10d._object_to_tensor = _for_jobs(_c10d._object_to_tensor, _to_tensor)
    _c10d._tensor_to_object = _for_jobs(_c10d._tensor_to_object, _to_object)
    _c10d._get_object_coll_device = _for_jobs(_c10d._get_object_coll_device, _device)


def _for_jobs(original: Any, instead: Callable[..., Any]) -> Any:
    if getattr(original, "of_jobs", False):
        return original

    @wraps(original)
    def either(*given: Any, **named: Any) -> Any:
        groups = [one for one in (named.get("group"), *given) if isinstance(one, dist.ProcessGroup)]
        group = groups[0] if groups else _c10d._get_default_group()
        return (instead if isinstance(group, LastingGroup) else original)(*given, **named)

    either.of_jobs = True  # type: ignore[attr-defined]
    return either


def _to_tensor(
    value: Any, device: Any, group: Any, weights_only: bool = False
) -> tuple[Tensor, Tensor]:
    """The bytes of ``value`` and their number. ``weights_only``: torch 2.15 asks so that nothing is
    unpickled, which nothing is. Raises TypeError for what is not sent.
    """
    try:
        _require_plain(value, "the object")
        form = json.dumps(typed.encode(value, "the object")).encode()
    except TypeError as error:
        raise TypeError(
            f"torch.distributed.{_called()}: {error} (no rank of a job unpickles what another"
            " sends; a PipelineStage needs no such exchange if it is given its input_args and"
            " output_args)"
        ) from None
    # torch makes it longer where another rank sends more: it needs memory of its own
    data = torch.frombuffer(bytearray(form), dtype=torch.uint8).clone().to(device)
    return data, torch.tensor([data.numel()], dtype=torch.int64, device=device)


def _to_object(tensor: Tensor, size: Any, group: Any, weights_only: bool = False) -> Any:
    """Tensors in it are on the CPU. Raises ValueError for what ``_to_tensor`` never makes."""
    raw = tensor.cpu().numpy().tobytes()[: int(size)]
    try:
        return typed.decode(json.loads(raw))
    except (RecursionError, RuntimeError, AttributeError) as error:
        raise ValueError(f"a rank has sent what is no object of a job: {error}") from error


def _device(group: Any = None) -> str:
    return (group or _c10d._get_default_group()).object_device  # type: ignore[no-any-return]


def _require_plain(value: Any, path: str) -> None:
    """Raise TypeError for what would arrive as something else, or not at all."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, Tensor | numpy.generic):
        return
    if kind in _MAPPINGS:
        for key, item in value.items():
            _require_plain(key, f"a key of {path}")
            _require_plain(item, f"{path}[{key!r}]")
    elif kind in _SEQUENCES:
        for place, item in enumerate(value):
            _require_plain(item, f"{path}[{place}]")
    else:
        raise TypeError(
            f"{path} is a {kind.__name__}: send numbers, text, tensors, lists, tuples, sets and"
            " dictionaries"
        )


def _called() -> str:
    """The function of torch's that the script has called."""
    frame = sys._getframe(3)
    while frame.f_code.co_name.startswith("<") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_name
