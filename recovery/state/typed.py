"""Encodes values that are not tensors of the state as JSON, and back with the same types and the
same bits.

JSON has no tuples, no infinity and no keys but text. A value it cannot hold becomes an object with
one key that begins with "!". Nothing is unpickled and no class is looked up by what a file says,
but for those that the script has named (``keep_type``): code (a scheduler's functions) is not
stored, the process that decodes keeps its own.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

PutTensor = Callable[[Tensor, str], Any]
"""Encodes a tensor that was found at a path."""
TakeTensor = Callable[[Any, str, Any], Tensor]
"""Decodes it again, from what ``PutTensor`` made of it, the path, and the value the process has
there now.
"""

Kind = TypeVar("Kind", bound=type)

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "!tuple": tuple,
    "!set": set,
    "!frozenset": frozenset,
}
_MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "!dict": dict,
    "!ordered": OrderedDict,
    "!counter": lambda pairs: Counter(dict(pairs)),
}
_MOMENTS: dict[str, Callable[[str], Any]] = {
    "!datetime": datetime.fromisoformat,
    "!date": date.fromisoformat,
    "!time": time.fromisoformat,
}
_KEPT: dict[str, type] = {}


def keep_type(kind: Kind) -> Kind:
    """Have values of this class of the script's stored and made again: a dataclass, by its fields,
    a named tuple or an enum. Returns the class, so that it may decorate it. Raises TypeError for
    any other.
    """
    fields = dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")
    if not (fields or issubclass(kind, Enum)):
        raise TypeError(f"{kind.__name__} is no dataclass, named tuple or enum")
    _KEPT[kind.__qualname__] = kind
    return kind


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
    if _KEPT.get(plain.__qualname__) is plain and not isinstance(value, Enum):
        return {"!kept": [plain.__qualname__, encode(_fields(value), path, tensor)]}
    if isinstance(value, Enum):
        return {"!enum": [value.name, plain.__qualname__]}
    if isinstance(value, int | float | complex | numpy.generic):
        return _number(value)
    if isinstance(value, Mapping):
        return _mapping(value, path, tensor)
    if isinstance(value, list):
        return [encode(item, f"{path}.{place}", tensor) for place, item in enumerate(value)]
    for mark, kind in (("!tuple", tuple), ("!set", set), ("!frozenset", frozenset)):
        if isinstance(value, kind):
            items = value if mark == "!tuple" else _sorted(value)
            return {mark: [encode(v, f"{path}.{place}", tensor) for place, v in enumerate(items)]}
    if isinstance(value, deque):
        items = [encode(v, f"{path}.{place}", tensor) for place, v in enumerate(value)]
        return {"!deque": [items, value.maxlen]}
    if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
        raw = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
        return {"!array": [value.dtype.str, list(value.shape), raw]}
    if isinstance(value, bytes | bytearray):
        mark = "!bytes" if isinstance(value, bytes) else "!bytearray"
        return {mark: base64.b64encode(value).decode()}
    if isinstance(value, timedelta):
        return {"!timedelta": [value.days, value.seconds, value.microseconds]}
    for mark in _MOMENTS:
        if plain.__name__ == mark[1:] and isinstance(value, date | time):
            return {mark: value.isoformat()}
    if isinstance(value, torch.dtype):
        return {"!dtype": name_of(value)}
    if callable(value):
        return {"!code": getattr(value, "__qualname__", type(value).__name__)}
    raise TypeError(
        f"{path} is a {type(value).__name__}, which can be neither saved nor copied to another"
        " rank: keep numbers, text, tensors, lists and dictionaries there, or name its class with"
        " recovery.keep_type if it is a dataclass, a named tuple or an enum"
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
        if mark == "!deque" and len(body) == 2 and isinstance(body[0], list):
            items = decode(body[0], [*live] if isinstance(live, deque) else None, path, tensor)
            return deque(items, maxlen=body[1])
        if mark == "!kept":
            held = _fields(live) if type(live).__qualname__ == body[0] else None
            return _made(body[0], decode(body[1], held, path, tensor))
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


def _sorted(items: Any) -> list[Any]:
    """In an order that is the same in every process, which that of a set is not."""
    try:
        return sorted(items)
    except TypeError:
        return sorted(items, key=lambda item: (type(item).__name__, repr(item)))


def _fields(value: Any) -> dict[str, Any]:
    """Of a dataclass or a named tuple."""
    if dataclasses.is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    return dict(value._asdict())


def _made(name: str, fields: dict[str, Any]) -> Any:
    """The value of these fields; no code of a dataclass's own runs."""
    kind = _kept(name)
    if not dataclasses.is_dataclass(kind):
        return kind(**fields)
    made = object.__new__(kind)
    for key, value in fields.items():
        object.__setattr__(made, key, value)
    return made


def _kept(name: str) -> type:
    if name not in _KEPT:
        raise ValueError(f"no class {name} is known here: name it with recovery.keep_type")
    return _KEPT[name]


def _enum(name: str, of: str, live: Any) -> Any:
    kind: Any = type(live) if isinstance(live, Enum) else _kept(of)
    return kind[name]


def round_trip(value: Any, path: str) -> Any:
    """What another process would get of a value. Raises TypeError, with the place, where that is
    not the same to the type and the bit.
    """
    again = decode(json.loads(json.dumps(encode(value, path))), value, path)
    if (why := difference(value, again, path)) is not None:
        raise TypeError(
            f"{why}, once it has been saved or copied to another rank: keep plain values there, or"
            " name its class with recovery.keep_type"
        )
    return again


def difference(given: Any, found: Any, path: str) -> str | None:
    """Where and how a value is not the one that was given, to the type and the bit, or None. Code
    is not compared.
    """
    if type(given) is not type(found):
        return f"{path} is a {type(found).__name__} in place of a {type(given).__name__}"
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(given, Mapping):
        ours, theirs = ([(type(key), key) for key in one] for one in (given, found))
        # older checkpoints have a plain dictionary's keys sorted
        if ours != theirs if isinstance(given, OrderedDict) else {*ours} != {*theirs}:
            return f"{path} has the keys {_short([*found])} in place of {_short([*given])}"
        pairs = [(key, given[key], found[key]) for key in given]
    elif isinstance(given, list | tuple | deque):
        if len(given) != len(found):
            return f"{path} has {len(found)} items in place of {len(given)}"
        pairs = [(n, one, other) for n, (one, other) in enumerate(zip(given, found, strict=True))]
    elif dataclasses.is_dataclass(given):
        pairs = [(key, one, _fields(found)[key]) for key, one in _fields(given).items()]
    elif _exactly(given, path) != _exactly(found, path):
        return f"{path} is {_short(found)} in place of {_short(given)}"
    for key, one, other in pairs:
        if (why := difference(one, other, f"{path}.{key}")) is not None:
            return why
    return None


def _exactly(value: Any, path: str) -> tuple[Any, ...]:
    """Equal for values that are the same, unlike 0.0 and -0.0."""
    more = value.dtype if isinstance(value, numpy.ndarray | numpy.generic) else None
    if isinstance(value, datetime | time):
        more = repr(value.tzinfo)
    return json.dumps(encode(value, path)), more


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
            name, of = body if isinstance(body, list) else (body, "")
            return _enum(name, of, live)
        case "!array":
            kind, shape, raw = body
            return numpy.frombuffer(bytearray(base64.b64decode(raw)), numpy.dtype(kind)).reshape(
                shape
            )
        case "!bytes":
            return base64.b64decode(body)
        case "!bytearray":
            return bytearray(base64.b64decode(body))
        case "!timedelta":
            return timedelta(*body)
        case "!deque":  # of before its limit was kept
            return deque(decode(body))
        case "!datetime" | "!date" | "!time":
            return _MOMENTS[mark](body)
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
