"""``--set a.b=value``: change a scenario from the command line, errors pointing into the argument."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from chaos.diagnostics import Loc, Placed, Span, scenario_error
from chaos.source import Document, parse

OPTION = "--set"


def apply(document: Document, overrides: Sequence[str]) -> Document:
    """The document with each ``a.b=value`` set, later ones winning.

    The value is YAML; a list item is named by its index or by its ``id``. Raises ScenarioError when an
    override cannot be applied.
    """
    for override in overrides:
        document = _apply_one(document, override)
    return document


def _apply_one(document: Document, override: str) -> Document:
    path, equals, text = override.partition("=")
    if not equals or not path or not all(path.split(".")):
        raise _error(override, 1, len(override), "write a.b=value, such as workload.steps=50")
    value = parse(text, OPTION)
    offset = len(path) + 1
    if value.problems:
        raise scenario_error(
            [Placed(span=_moved(p.span, override, offset), message=p.message) for p in value.problems]
        )
    loc, tree = _assign(document.tree, path.split("."), value.tree, override)
    keys = {at: span for at, span in document.keys.items() if at[: len(loc)] != loc or at == loc}
    values = {at: span for at, span in document.values.items() if at[: len(loc)] != loc}
    keys[loc] = Span(source=OPTION, line=1, column=1, width=len(path), text=override)
    keys |= {(*loc, *at): _moved(span, override, offset) for at, span in value.keys.items()}
    values |= {(*loc, *at): _moved(span, override, offset) for at, span in value.values.items()}
    return dataclasses.replace(document, tree=tree, keys=keys, values=values)


def _assign(tree: Any, parts: list[str], value: Any, override: str) -> tuple[Loc, Any]:
    """A copy of ``tree`` with the value at the end of ``parts``, and where that is."""
    if not parts:
        return (), value
    head, rest = parts[0], parts[1:]
    if isinstance(tree, list):
        index = _index(tree, head)
        if index is None:
            names = [str(item["id"]) for item in tree if isinstance(item, dict) and "id" in item]
            have = f"it has {len(tree)} items" + (f" ({', '.join(names)})" if names else "")
            raise _error(
                override, override.find(head) + 1, len(head), f"no item {head!r} in this list; {have}"
            )
        loc, child = _assign(tree[index], rest, value, override)
        return (index, *loc), [*tree[:index], child, *tree[index + 1 :]]
    if tree is not None and not isinstance(tree, dict):
        raise _error(
            override, override.find(head) + 1, len(head), f"cannot set {head!r} inside the value {tree!r}"
        )
    mapping = tree or {}
    loc, child = _assign(mapping.get(head), rest, value, override)
    return (head, *loc), {**mapping, head: child}


def _index(items: list[Any], name: str) -> int | None:
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("id") == name:
            return index
    return int(name) if name.isdecimal() and len(name) < 6 and int(name) < len(items) else None


def _moved(span: Span, override: str, offset: int) -> Span:
    if span.line > 1:
        return Span(source=OPTION, line=1, column=1, width=len(override), text=override)
    return dataclasses.replace(span, column=span.column + offset, text=override)


def _error(override: str, column: int, width: int, message: str) -> Exception:
    span = Span(source=OPTION, line=1, column=column, width=width, text=override)
    return scenario_error([Placed(span=span, message=message)])
