"""Reads the text of a list of taints, with the line of each entry and field."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.error import YAMLWarning
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from trainchaos.recovery.health.taint import TaintError

_TAG = "tag:yaml.org,2002:"
_LEFT = "correct the file by hand; it was left as it is"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry: its plain values, its line, and the line of each field; lines count from 1."""

    values: Mapping[str, Any]
    line: int
    lines: Mapping[str, int] = field(default_factory=dict)


def read_text(text: str, source: str, reads: int) -> tuple[int, list[Entry]]:
    """The version of a list, and its entries; of a version above ``reads`` none, as they may mean
    anything. ``source``: name of the file, for errors. A text without a value is an empty list.
    Raises TaintError, with file and line.
    """
    root = _composed(text, source)
    if root is None:
        return reads, []
    found = _mapping(root, source, "the list is a mapping with version and taints")
    version = found.get("version")
    number = version and _plain(version, source)
    if type(number) is not int or number < 1:
        raise _wrong(source, version or root, "version: has to be 1 or another whole number")
    if number > reads:
        return number, []
    unknown = [name for name in found if name not in ("version", "taints")]
    if unknown:
        raise _wrong(source, found[unknown[0]], f"{unknown[0]}: there is no such field")
    listed = found.get("taints")
    if listed is None or (isinstance(listed, ScalarNode) and _plain(listed, source) is None):
        return number, []
    if not isinstance(listed, SequenceNode):
        raise _wrong(source, listed, "taints: is a list, each entry after a dash")
    return number, [_entry(node, place, source) for place, node in enumerate(listed.value, 1)]


def _composed(text: str, source: str) -> Node | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", YAMLWarning)
            found: Node | None = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        line = text.count("\n", 0, getattr(error, "position", 0)) if mark is None else mark.line
        raise TaintError(f"{source}:{line + 1}: is not valid YAML: {said}", hint=_LEFT) from error
    except RecursionError as error:
        raise TaintError(f"{source}:1: is nested too deeply", hint=_LEFT) from error
    return found


def _entry(node: Node, number: int, source: str) -> Entry:
    found = _mapping(node, source, f"taint {number}: is a mapping with node or device, reason ...")
    return Entry(
        values={
            name: _facts(value, source) if name == "evidence" else _plain(value, source)
            for name, value in found.items()
        },
        line=_line(node),
        lines={name: _line(value) for name, value in found.items()},
    )


def _facts(node: Node, source: str) -> Any:
    if not isinstance(node, MappingNode):
        return _plain(node, source)
    facts = _mapping(node, source, "evidence: is a text, or facts by name")
    return {name: _plain(value, source) for name, value in facts.items()}


def _mapping(node: Node, source: str, what: str) -> dict[str, Node]:
    """The values of a mapping by their keys, which are texts and differ."""
    if not isinstance(node, MappingNode) or node.tag != f"{_TAG}map":
        raise _wrong(source, node, what)
    _unanchored(node, source)
    found: dict[str, Node] = {}
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise _wrong(source, key, what)
        if key.value in found:
            raise _wrong(source, key, f"{key.value}: is given twice")
        found[key.value] = value
    return found


def _plain(node: Node, source: str) -> Any:
    """The value of a scalar; a time stays a text."""
    _unanchored(node, source)
    kind = str(node.tag).removeprefix(_TAG)
    if not isinstance(node, ScalarNode) or kind not in (
        "str",
        "int",
        "float",
        "bool",
        "null",
        "timestamp",
    ):
        raise _wrong(source, node, "a single value belongs here")
    text = str(node.value)
    try:
        if kind == "int":
            return int(text.replace("_", ""), 0 if text.lstrip("+-").startswith("0o") else 10)
        if kind == "float":
            return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    except ValueError:
        raise _wrong(source, node, f"{text} is no number that is read here") from None
    if kind == "bool":
        return text.lower() == "true"
    return None if kind == "null" else text


def _unanchored(node: Node, source: str) -> None:
    if node.anchor is not None:
        raise _wrong(source, node, "anchors and aliases are not read")


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _wrong(source: str, node: Node, what: str) -> TaintError:
    return TaintError(f"{source}:{_line(node)}: {what}", hint=_LEFT)
