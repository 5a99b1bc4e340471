"""Encodes values that are not tensors of the state as JSON, and back with the same types and the
same bits.

JSON has no tuples, no infinity and no keys but text. A value it cannot hold becomes an object with
one key that begins with "!". Nothing is unpickled and nothing is looked up by name: code (a
scheduler's functions) is not stored, the process that decodes keeps its own.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor

PutTensor = Callable[[Tensor, str], Any]
"""Encodes a tensor that was found at a path."""
TakeTensor = Callable[[Any, str, Any], Tensor]
"""Decodes it again, from what ``PutTensor`` made of it, the path, and the value the process has
there now.
"""

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"!tuple": tuple, "!set": set, "!deque": deque}
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "!dict": dict,
    "!ordered": OrderedDict,
    "!counter": lambda pairs: Counter(dict(pairs)),
}


def inline(tensor: Tensor, path: str) -> Any:
    """A tensor as type, shape and bytes; for small ones, such as a learning rate."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    name = name_of(tensor.dtype)
    return {"!tensor": [name, list(tensor.shape), base64.b64encode(raw).decode()]}


def from_inline(value: Any, path: str, live: Any) -> Tensor:
    """What ``inline`` encoded, on the CPU. Raises ValueError."""
    name, shape, raw = value["!tensor"]
    data = bytearray(base64.b64decode(raw))
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype_of(name)).reshape(shape)


@cache
def name_of(dtype: torch.dtype) -> str:
    """What a type is called here, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The type called so, such as ``float32``. Raises ValueError."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of a tensor")
    return found


def encode(value: Any, path: str, tensor: PutTensor = inline) -> Any:
    """``value`` as JSON. Raises TypeError, naming the place in ``path``, for what can be neither
    stored nor copied.
    """
    # of most values it tells enough, and each look at another class takes a while
    plain = type(value)
    if value is None or plain is bool or plain is str or plain is int:
        return value
    if isinstance(value, Tensor):
        return tensor(value, path)
    if isinstance(value, bool | str) and not isinstance(value, Enum):
        return value
    if isinstance(value, Enum):
        return {"!enum": value.name}
    if isinstance(value, int | float | complex | numpy.generic):
        return _number(value)
    if isinstance(value, Mapping):
        return _mapping(value, path, tensor)
    if isinstance(value, list):
        return [encode(item, f"{path}.{place}", tensor) for place, item in enumerate(value)]
    for mark, kind in (("!tuple", tuple), ("!set", set | frozenset), ("!deque", deque)):
        if isinstance(value, kind):
            items = sorted(value) if mark == "!set" else value
            return {
                mark: [encode(item, f"{path}.{place}", tensor) for place, item in enumerate(items)]
            }
    if isinstance(value, torch.dtype):
        return {"!dtype": name_of(value)}
    if callable(value):
        return {"!code": getattr(value, "__qualname__", type(value).__name__)}
    raise TypeError(
        f"{path} is a {type(value).__name__}, which can be neither saved nor copied to another"
        " rank: keep numbers, text, tensors, lists and dictionaries there"
    )


def decode(value: Any, live: Any = None, path: str = "", tensor: TakeTensor = from_inline) -> Any:
    """What ``encode`` was given. ``live``: what this process has in its place, whose code is kept.

    Raises ValueError for what ``encode`` never makes.
    """
    if isinstance(value, list):
        return [decode(item, _at(live, n), f"{path}.{n}", tensor) for n, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if len(value) != 1 or not mark.startswith("!"):
        return {
            key: decode(item, _at(live, key), f"{path}.{key}", tensor)
            for key, item in value.items()
        }
    body = value[mark]
    try:
        if mark == "!tensor":
            return tensor(value, path, live)
        if mark in _SEQUENCES:
            items = [
                decode(item, _at(live, n), f"{path}.{n}", tensor) for n, item in enumerate(body)
            ]
            return _SEQUENCES[mark](items)
        if mark in _MAPPINGS:
            pairs = [(decode(key), item) for key, item in body]
            return _MAPPINGS[mark](
                [(k, decode(item, _at(live, k), f"{path}.{k}", tensor)) for k, item in pairs]
            )
        return _single(mark, body, live)
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path or 'a value'} is not what was encoded: {error}") from error


def _number(value: Any) -> Any:
    if isinstance(value, numpy.generic):
        return {"!numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, complex):
        return {"!complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"!float": str(float(value))}
    return value  # JSON writes the shortest text that reads back as the same float


def _mapping(value: Mapping[Any, Any], path: str, tensor: PutTensor) -> Any:
    if type(value) is dict and all(isinstance(key, str) and key[:1] != "!" for key in value):
        return {key: encode(item, f"{path}.{key}", tensor) for key, item in value.items()}
    mark = "!counter" if isinstance(value, Counter) else "!dict"
    if isinstance(value, OrderedDict):
        mark = "!ordered"
    pairs = [
        [encode(k, f"{path}: a key"), encode(v, f"{path}.{k}", tensor)] for k, v in value.items()
    ]
    return {mark: pairs}


def _single(mark: str, body: Any, live: Any) -> Any:
    match mark:
        case "!float":
            return float(body)
        case "!complex":
            return complex(*(float.fromhex(part) for part in body))
        case "!numpy":
            kind, raw = body
            return numpy.frombuffer(base64.b64decode(raw), dtype=numpy.dtype(kind))[0]
        case "!dtype":
            return dtype_of(body)
        case "!enum":
            return type(live)[body]
        case "!code":
            return live
    raise ValueError(f"{mark!r} is no kind of value")


def _at(live: Any, key: Any) -> Any:
    """What there is at a place of the process's own value, if anything."""
    if type(live) is dict or isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, list | tuple) and isinstance(key, int) and key < len(live):
        return live[key]
    return None
