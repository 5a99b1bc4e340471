"""Translates pydantic's errors into the terms of the scenario file, each at the key or value to
change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from trainchaos.chaos.source.diagnostics import Loc, Problem, unknown

M = TypeVar("M", bound=BaseModel)

_UNITS = ("s sec second seconds", "ms milliseconds", "m min minute minutes", "h hour hours")
_UNIT_WORDS: Mapping[str, str] = {
    word: words.split()[0] for words in _UNITS for word in words.split()
}
_NEEDS: Mapping[str, str] = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "model": "a mapping (key: value)",
    "dict": "a mapping (key: value)",
}
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}
_MOST_EXPLAINED = 200  # more errors than are ever shown
_QUOTED = re.compile(r"'([^']*)'")


def validate(model: type[M], tree: Any, base: Loc = ()) -> tuple[M | None, list[Problem]]:
    """Validate plain YAML values strictly (no bool for a number, no text for one).

    ``base``: where ``tree`` stands.
    """
    try:
        # JSON mode is strict about scalars, yet builds enums and tuples from text and lists.
        return model.model_validate_json(json.dumps(tree), strict=True), []
    except ValidationError as error:
        return None, explain(error.errors(include_url=False), model, tree, base)


def valid(model: type[M], tree: Any) -> M | None:
    """Like ``validate``, without the explanation, whose cost grows with the number of errors."""
    try:
        return model.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError:
        return None


def explain(
    errors: Sequence[Any], model: type[BaseModel], tree: Any, base: Loc = ()
) -> list[Problem]:
    """Each error as a Problem."""
    problems: dict[tuple[Loc, str], Problem] = {}
    for error in errors[:_MOST_EXPLAINED]:
        problem = _explain_one(error, model, tree, base)
        if problem is not None:
            problems.setdefault((problem.loc, problem.message), problem)
    if errors and not problems:  # an error must never be explained away
        loc = settle(tree, errors[0]["loc"])
        return [
            Problem((*base, *loc), _message(errors[0], str(loc[-1:] or "the file"), at(tree, loc)))
        ]
    if len(errors) > _MOST_EXPLAINED:
        rest = f"{len(errors) - _MOST_EXPLAINED} more errors are checked once these are fixed"
        problems[base, rest] = Problem(base, rest)
    return list(problems.values())


def settle(tree: Any, loc: Sequence[str | int]) -> Loc:
    """The part of pydantic's ``loc`` that exists in the tree: tags of unions and names of defaults
    are dropped.
    """
    here, out = tree, []
    for part in loc:
        inside = part in here if isinstance(here, dict) else False
        if isinstance(here, list):
            inside = isinstance(part, int) and part < len(here)
        if inside:
            here = here[part]
            out.append(part)
    return tuple(out)


def at(tree: Any, loc: Sequence[str | int]) -> Any:
    """The value at a settled place."""
    for part in loc:
        tree = tree[part]
    return tree


def _explain_one(
    error: Mapping[str, Any], model: type[BaseModel], tree: Any, base: Loc
) -> Problem | None:
    kind, raw, context = error["type"], error["loc"], error.get("ctx") or {}
    loc = settle(tree, raw)
    full = (*base, *loc)
    if kind == "extra_forbidden":
        return Problem(full, _unknown_key(model, raw), on_key=True)
    if kind == "missing":
        return Problem(full, f"{raw[-1]!r} is missing{_owner(full)}", on_key=True)
    name = next((str(part) for part in reversed(full) if isinstance(part, str)), "the file")
    value = at(tree, loc)
    message = _message(error, name, value)
    if kind == "value_error" and isinstance(value, dict):
        # a model's own check names the field it complains about first
        first = message.split(" ", 1)[0]
        full = (*full, first) if first in value else full
    return Problem(full, message, word=str(getattr(context.get("error"), "word", "")))


def _unknown_key(model: type[BaseModel], raw: Sequence[str | int]) -> str:
    """Message for an unknown key; if it belongs one level up, the message says so."""
    key, known = str(raw[-1]), _keys_at(model, raw[:-1])
    if key in known:  # of another form of the field
        return f"{key!r} does not go with the keys beside it"
    message = unknown("key", key, known)
    if "did you mean" in message or len(raw) < 2 or not isinstance(raw[-2], str):
        return message
    above = key in _keys_at(model, raw[:-2])
    return (
        f"unknown key {key!r} in {raw[-2]}: it belongs beside {raw[-2]}, not in it"
        if above
        else message
    )


def _message(error: Mapping[str, Any], name: str, value: Any) -> str:
    kind, context = error["type"], error.get("ctx") or {}
    stem = kind.split("_")[0]
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return f"{name} must be {word} {context[key]:g}, not {error['input']}"
    if kind in ("literal_error", "enum"):
        expected = str(context.get("expected", ""))
        choices = _QUOTED.findall(expected) or [expected]
        return (
            unknown(name, value, choices)
            if isinstance(value, str)
            else f"{name} needs {', '.join(choices)}, not {_show(value)}"
        )
    if kind.endswith(("_type", "_parsing", "_from_float")) and stem in _NEEDS:
        quoted = (
            isinstance(value, str)
            and stem in ("int", "float")
            and value.strip().lstrip("+-").replace(".", "", 1).isdigit()
        )
        return f"{name} needs {_NEEDS[stem]}, not {_show(value)}" + (
            "; write it without quotes" if quoted else ""
        )
    if kind == "string_pattern_mismatch":
        return (
            f"{name} {value!r} may hold lower-case letters, digits, '.', '_' and '-', a letter or"
            " digit first"
        )
    if kind == "too_short":
        return f"{name} needs at least {context.get('min_length', 1)} item"
    if kind == "string_too_long":
        return f"{name} is longer than {context['max_length']} characters"
    if kind == "form":
        return f"{name} needs {error['msg']}, not {_show(value)}{_instead(name, value)}"
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    return f"{name}: {error['msg']}"


def _instead(name: str, value: Any) -> str:
    """A suggestion for what was probably meant, or ""."""
    if name == "select" and isinstance(value, int) and not isinstance(value, bool):
        return f"; write {{count: {value}}}"
    if name == "select" and isinstance(value, str) and value.strip().endswith("%"):
        return f"; write {{percent: {value.strip().removesuffix('%')}}}"
    if name == "duration" and isinstance(value, dict) and len(value) == 1:
        ((key, amount),) = value.items()
        if (
            str(key) in _UNIT_WORDS
            and isinstance(amount, int | float)
            and not isinstance(amount, bool)
        ):
            return f"; write {amount:g}{_UNIT_WORDS[str(key)]}"
    return ""


def _owner(loc: Loc) -> str:
    names = [str(part) for part in loc]
    return f" in {'.'.join(names)}" if names else ""


def _show(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."


def _keys_at(model: type[BaseModel], loc: Sequence[str | int]) -> set[str]:
    """Keys that are valid at a place, by the models' fields."""
    models = [model]
    for part in loc:
        fields = [
            m.model_fields[part] for m in models if isinstance(part, str) and part in m.model_fields
        ]
        # an index, a key of a free mapping or the tag of a union stays with the models there are
        models = [found for one in fields for found in _models(one.annotation)] or models
    return {field.alias or name for m in models for name, field in m.model_fields.items()}


def _models(annotation: Any) -> list[type[BaseModel]]:
    args = get_args(annotation)
    if args:
        return [found for arg in args for found in _models(arg)]
    return (
        [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
    )
