"""``extends: other.yaml``: a scenario that contains only its changes to another one.

Mappings are merged, key by key and all the way down; lists and plain values are replaced; ``null``
removes an inherited value. Every value keeps its position in its own file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.source.diagnostics import Loc, LocatedProblem, Span, scenario_error
from trainchaos.chaos.source.source import Document, read_document

MAX_CHAIN = 10
_KEY = ("extends",)


def extended(document: Document, path: Path) -> Document:
    """The document on top of what it extends. ``path``: of its file.

    Raises ScenarioError for a missing file, a circle, or more than ``MAX_CHAIN`` files in a row.
    """
    return _extended(document, path, (path.resolve(),))


def _extended(document: Document, path: Path, chain: tuple[Path, ...]) -> Document:
    if "extends" not in document.tree:
        return document
    name = document.tree["extends"]
    if not isinstance(name, str) or not name or "${" in name or "\0" in name:
        raise _error(document, "extends needs the name of a scenario file, relative to this one")
    base_path = path.parent / name
    try:
        resolved, is_file = base_path.resolve(), base_path.is_file()
    # a name that is too long, or links in a circle
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or "links in a circle"
        raise _error(document, f"extends names a file that cannot be: {why}") from error
    if resolved in chain:
        circle = " -> ".join(each.name for each in (*chain[chain.index(resolved) :], resolved))
        raise _error(document, f"extends goes in a circle: {circle}")
    if len(chain) >= MAX_CHAIN:
        raise _error(document, f"more than {MAX_CHAIN} files extend one another")
    if not is_file:
        raise _error(document, f"file {base_path} does not exist")
    base = _extended(read_document(base_path), base_path, (*chain, resolved))
    return _on_top(base, document)


def _on_top(base: Document, own: Document) -> Document:
    gone: set[Loc] = set()
    tree = _merge(base.tree, {k: v for k, v in own.tree.items() if k != "extends"}, (), gone)

    def kept(places: Mapping[Loc, Span]) -> dict[Loc, Span]:
        return {
            loc: span
            for loc, span in places.items()
            if not any(loc[:length] in gone for length in range(1, len(loc) + 1)) and loc != _KEY
        }

    return dataclasses.replace(
        own,
        tree=tree,
        keys={**kept(base.keys), **own.keys},
        values={**kept(base.values), **own.values},
        problems=(*base.problems, *own.problems),
    )


def _merge(base: Any, own: Any, loc: Loc, gone: set[Loc]) -> Any:
    """The merged value. ``gone``: collects the places of the base that are replaced."""
    if not isinstance(base, dict) or not isinstance(own, dict):
        gone.add(loc)
        return own
    merged = dict(base)
    for key, value in own.items():
        if value is None and key in base:
            gone.add((*loc, key))
            del merged[key]
        else:
            merged[key] = _merge(base[key], value, (*loc, key), gone) if key in base else value
    return merged


def _error(document: Document, message: str) -> ScenarioError:
    return scenario_error([LocatedProblem(document.locate(_KEY), message)])
