"""``--set a.b=value``, ``--repeat n``, ``--launcher name``: change a scenario from the command
line, errors pointing into the argument.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainchaos.chaos.source.diagnostics import Loc, LocatedProblem, Span, scenario_error
from trainchaos.chaos.source.source import Document, parse

OPTION = "--set"
_PLACES = frozenset({"nodes", "nodes_per_rack"})


@dataclass(frozen=True, kw_only=True)
class Override:
    """One change. ``path``: ``a.b``; ``value``: YAML; ``option``: the option it came from;
    ``text``: its argument as typed, in which the value begins at ``offset`` (from 0).
    """

    path: str
    value: str
    option: str
    text: str
    offset: int


def of_option(option: str, path: str, value: object) -> Override:
    """The change that an option of its own, such as ``--repeat 3``, makes."""
    return Override(
        path=path, value=str(value), option=option, text=f"{option} {value}", offset=len(option) + 1
    )


def apply(document: Document, overrides: Sequence[str | Override]) -> Document:
    """The document with each ``a.b=value`` set, later ones winning.

    The value is YAML; a list item is named by its index or by its ``id``. A launcher that is named
    anew keeps its nodes and racks. Raises ScenarioError when an override cannot be applied.
    """
    for override in overrides:
        document = _apply_one(document, _read(override) if isinstance(override, str) else override)
    return document


def _read(text: str) -> Override:
    path, equals, value = text.partition("=")
    if not equals or not path or not all(path.split(".")):
        raise _error(OPTION, text, 1, len(text), "write a.b=value, such as workload.steps=50")
    return Override(path=path, value=value, option=OPTION, text=text, offset=len(path) + 1)


def _apply_one(document: Document, override: Override) -> Document:
    path = override.path
    value = parse(override.value, override.option)
    if value.problems:
        raise scenario_error(
            [LocatedProblem(_moved(p.span, override), p.message) for p in value.problems]
        )
    new, kept = value.tree, frozenset[str]()
    old = document.tree.get(path) if isinstance(document.tree, dict) else None
    if path == "launcher" and isinstance(new, str) and isinstance(old, dict):
        kept = frozenset(_PLACES & old.keys())
        new = {"kind": new, **{name: old[name] for name in kept}}
    loc, tree = _assign(document.tree, path.split("."), new, override)

    def stays(at: Loc) -> bool:
        return at[: len(loc)] != loc or (len(at) > len(loc) and at[len(loc)] in kept)

    keys = {at: span for at, span in document.keys.items() if stays(at) or at == loc}
    values = {at: span for at, span in document.values.items() if stays(at)}
    width = len(path) if override.option == OPTION else len(override.option)
    keys |= _made_on_the_way(document, loc, override)
    keys[loc] = Span(source=override.option, line=1, column=1, width=width, text=override.text)
    keys |= {(*loc, *at): _moved(span, override) for at, span in value.keys.items()}
    values |= {(*loc, *at): _moved(span, override) for at, span in value.values.items()}
    return dataclasses.replace(document, tree=tree, keys=keys, values=values)


def _made_on_the_way(document: Document, loc: Loc, override: Override) -> dict[Loc, Span]:
    """The mappings above ``loc`` that only this option adds, at their names in its argument."""
    made, column = dict[Loc, Span](), 1
    for depth, part in enumerate(override.path.split(".")[:-1], start=1):
        if loc[:depth] not in document.values and loc[:depth] not in document.keys:
            made[loc[:depth]] = Span(
                source=override.option, line=1, column=column, width=len(part), text=override.text
            )
        column += len(part) + 1
    return made


def _assign(tree: Any, parts: list[str], value: Any, override: Override) -> tuple[Loc, Any]:
    """A copy of ``tree`` with the value at the end of ``parts``, and where that is."""
    if not parts:
        return (), value
    head, rest = parts[0], parts[1:]
    if isinstance(tree, list):
        index = _index(tree, head)
        if index is None:
            names = [str(item["id"]) for item in tree if isinstance(item, dict) and "id" in item]
            have = f"it has {len(tree)} items" + (f" ({', '.join(names)})" if names else "")
            raise _inside(override, head, f"no item {head!r} in this list; {have}")
        loc, child = _assign(tree[index], rest, value, override)
        return (index, *loc), [*tree[:index], child, *tree[index + 1 :]]
    if tree is not None and not isinstance(tree, dict):
        raise _inside(override, head, f"cannot set {head!r} inside the value {tree!r}")
    mapping = tree or {}
    loc, child = _assign(mapping.get(head), rest, value, override)
    return (head, *loc), {**mapping, head: child}


def _index(items: list[Any], name: str) -> int | None:
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("id") == name:
            return index
    return int(name) if name.isdecimal() and len(name) < 6 and int(name) < len(items) else None


def _moved(span: Span, override: Override) -> Span:
    if span.line > 1:
        return Span(
            source=override.option, line=1, column=1, width=len(override.text), text=override.text
        )
    return dataclasses.replace(span, column=span.column + override.offset, text=override.text)


def _inside(override: Override, head: str, message: str) -> Exception:
    return _error(override.option, override.text, override.text.find(head) + 1, len(head), message)


def _error(option: str, text: str, column: int, width: int, message: str) -> Exception:
    span = Span(source=option, line=1, column=max(1, column), width=width, text=text)
    return scenario_error([LocatedProblem(span, message)])
