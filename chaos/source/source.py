"""Reads YAML into plain values, with the position of each key and value.

YAML 1.2 by ruamel's composer; the values are built here, because only then a duplicate key, a tag
or an oversized number is one more problem with a place instead of an exception that hides all
others.
"""

from __future__ import annotations

import math
import os
import stat
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML, YAMLError
from ruamel.yaml.error import YAMLWarning
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from trainchaos.chaos.errors import ScenarioError, newer
from trainchaos.chaos.source.bounds import text_problem
from trainchaos.chaos.source.diagnostics import Loc, LocatedProblem, Span, scenario_error

VERSION = 1
"""Newest version of the scenario format that is read."""
MAX_BYTES = 1_000_000
MAX_INT = 2**63 - 1
MAX_DEPTH = 20
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = frozenset(
    _TAG + name for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")
)


@dataclass(frozen=True, kw_only=True)
class Document:
    """Plain values (``tree``), the place of every key and value, and the problems found so far."""

    tree: Any
    keys: Mapping[Loc, Span]
    values: Mapping[Loc, Span]
    problems: tuple[LocatedProblem, ...] = ()

    @property
    def broken(self) -> set[Loc]:
        """Places whose values could not be read."""
        wrong = {problem.span for problem in self.problems}
        return {loc for loc, span in self.values.items() if span in wrong}

    def locate(self, loc: Loc, *, on_key: bool = False) -> Span:
        """The place of a value (or key), or of its nearest ancestor."""
        for length in range(len(loc), -1, -1):
            head = loc[:length]
            if head in self.keys and (on_key or head not in self.values):
                return self.keys[head]
            if head in self.values:
                return self.values[head]
        raise KeyError(loc)


def read_document(path: Path) -> Document:
    """Read a scenario file. Raises ScenarioError if it is not a YAML mapping."""
    document = parse(read_text(path), str(path))
    if not isinstance(document.tree, dict):
        kinds = {type(None): "is empty", list: "holds a list"}
        what = kinds.get(type(document.tree), "holds a single value")
        message = f"the file {what}; a scenario is a mapping (key: value)"
        raise scenario_error(document.problems or [LocatedProblem(document.locate(()), message)])
    version = document.tree.get("version")
    if type(version) is int and version > VERSION:  # the rest may mean anything
        message = newer("the scenario", version, VERSION, written="for")
        span = document.locate(("version",))
        raise scenario_error([LocatedProblem(span, message)])
    return document


def parse(text: str, source: str) -> Document:
    """Parse YAML text.

    Raises ScenarioError on a syntax error; other flaws become ``problems`` of the document.
    """
    if why := text_problem(text):
        span = Span(source=source, line=1, column=1, width=1, text="")
        raise scenario_error([LocatedProblem(span, why)])
    lines = text.splitlines() or [""]
    try:
        # such as one about anchors, which are refused below; it would be printed raw
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", YAMLWarning)
            root = YAML(typ="safe", pure=True).compose(text)
    except YAMLError as error:
        raise scenario_error([_syntax_problem(error, text, lines, source)]) from error
    except RecursionError as error:
        span = Span(source=source, line=1, column=1, width=1, text="")
        raise scenario_error([LocatedProblem(span, "nested too deeply")]) from error
    builder = _Builder(lines, source)
    first = next(
        (i for i, line in enumerate(lines) if line.strip() and not line.startswith("#")), 0
    )
    builder.values[()] = Span(source=source, line=first + 1, column=1, width=1, text=lines[first])
    tree = None if root is None else builder.build(root, ())
    return Document(
        tree=tree, keys=builder.keys, values=builder.values, problems=tuple(builder.problems)
    )


def read_text(path: Path, *, what: str = "scenario") -> str:
    """The text of a regular UTF-8 file of at most ``MAX_BYTES``. Raises ScenarioError for anything
    else.
    """
    try:
        # Not blocking: opening a named pipe must not wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise ScenarioError(f"{path}: is not a regular file")
            raw = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ScenarioError(
            f"{path}: cannot be read: {reason}", hint=_hint(error) if what == "scenario" else ""
        ) from error
    if len(raw) > MAX_BYTES:
        raise ScenarioError(f"{path}: is larger than {MAX_BYTES // 1000} kB; is it a {what}?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        message = f"not UTF-8 text (byte 0x{raw[error.start]:02x}); is it a {what}?"
        span = Span(source=str(path), line=line, column=column, width=1, text="")
        raise scenario_error([LocatedProblem(span, message)]) from error


def _hint(error: OSError | ValueError) -> str:
    if isinstance(error, IsADirectoryError):
        return "name a .yaml file in it"
    if isinstance(error, PermissionError):
        return "make it readable for this user"
    return "'chaos list scenarios' shows those at hand"


def _syntax_problem(error: YAMLError, text: str, lines: list[str], source: str) -> LocatedProblem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is not None:
        line, column = mark.line, mark.column
    else:
        before = text[: getattr(error, "position", 0)]
        line, column = before.count("\n"), len(before) - (before.rfind("\n") + 1)
    said = ", ".join(
        part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part
    )
    if isinstance(error, ReaderError):
        said = f"character #x{_code(error.character):x}: {error.reason}"
    line_text = lines[line] if line < len(lines) else ""
    if "${" in line_text:
        said = f"{said or error}; inside {{}} or [] a reference needs quotes: '${{vars.x}}'"
    span = Span(source=source, line=line + 1, column=column + 1, width=1, text=line_text)
    return LocatedProblem(span, f"not valid YAML: {said or error}")


def _code(character: str | bytes | int) -> int:
    return character if isinstance(character, int) else ord(character)


def _halved(text: str) -> bool:
    """Whether the text contains surrogates, which cannot be encoded."""
    return any("\ud800" <= char <= "\udfff" for char in text)


class _Builder:
    """Turns a node graph into plain values, and records their positions."""

    def __init__(self, lines: list[str], source: str) -> None:
        self.keys: dict[Loc, Span] = {}
        self.values: dict[Loc, Span] = {}
        self.problems: list[LocatedProblem] = []
        self._lines = lines
        self._source = source

    def build(self, node: Any, loc: Loc) -> Any:
        """The plain value of a node."""
        if len(loc) > MAX_DEPTH:
            return self._problem(node, f"nested deeper than {MAX_DEPTH} levels", loc)
        if node.anchor is not None:
            return self._problem(
                node,
                "anchors and aliases are not read; write ${vars.name} and put the value in vars",
                loc,
            )
        if str(node.tag) not in _PLAIN_TAGS:
            return self._problem(node, f"tags are not read ({node.tag})", loc)
        if isinstance(node, MappingNode):
            return self._mapping(node, loc)
        if isinstance(node, SequenceNode):
            if loc not in self.keys and loc:
                self.values[loc] = self._span(node, width=1)
            return [self.build(child, (*loc, index)) for index, child in enumerate(node.value)]
        self.values[loc] = self._span(node)
        return self._scalar(node, loc)

    def _mapping(self, node: MappingNode, loc: Loc) -> dict[str, Any]:
        if loc not in self.keys and loc:
            self.values[loc] = self._span(node, width=1)
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode) or key_node.anchor is not None:
                self._problem(key_node, "a key must be plain text", None)
                continue
            key, at = key_node.value, self._span(key_node)
            if _halved(key):
                self._problem(key_node, "a key holds half of a surrogate pair", None)
                continue
            if key in built:
                first = self.keys[(*loc, key)].line
                self.problems.append(
                    LocatedProblem(at, f"key {key!r} is given twice; the first is on line {first}")
                )
                continue
            self.keys[(*loc, key)] = at
            built[key] = self.build(value_node, (*loc, key))
        return built

    def _scalar(self, node: ScalarNode, loc: Loc) -> Any:
        kind, text = str(node.tag).removeprefix(_TAG), node.value
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() in ("true", "yes", "on", "y")
        if kind in ("int", "float"):
            try:
                return self._int(node, text, loc) if kind == "int" else self._float(node, text, loc)
            # forms of YAML 1.1, such as 1:30, which a %YAML directive brings back
            except ValueError:
                return self._problem(node, f"{text} is not a number", loc)
        if _halved(text):
            return self._problem(node, "text holds half of a surrogate pair", loc)
        return text

    def _int(self, node: ScalarNode, text: str, loc: Loc) -> Any:
        digits = text.replace("_", "").lower()
        base = {"0x": 16, "0o": 8, "0b": 2}.get(digits.lstrip("+-")[:2], 10)
        if len(digits) > 70 or abs(number := int(digits, base)) > MAX_INT:
            return self._problem(node, f"the number is too large (the limit is {MAX_INT})", loc)
        return number

    def _float(self, node: ScalarNode, text: str, loc: Loc) -> Any:
        plain = text.replace("_", "").lower()
        value = math.inf if plain.lstrip("+-") in (".inf", ".nan") else float(plain)
        return (
            value
            if math.isfinite(value)
            else self._problem(node, f"{text} is not a finite number", loc)
        )

    def _problem(self, node: Node, message: str, loc: Loc | None) -> None:
        span = self._span(node)
        if loc is not None:
            self.values[loc] = span
        self.problems.append(LocatedProblem(span, message))

    def _span(self, node: Node, width: int | None = None) -> Span:
        start, end = node.start_mark, node.end_mark
        text = self._lines[start.line] if start.line < len(self._lines) else ""
        stop = end.column if end.line == start.line else len(text.rstrip())
        return Span(
            source=self._source,
            line=start.line + 1,
            column=start.column + 1,
            text=text,
            width=max(1, stop - start.column) if width is None else width,
        )
