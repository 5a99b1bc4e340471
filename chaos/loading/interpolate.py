"""``${matrix.x}``, ``${vars.x}`` and ``${env:NAME:-default}``, and nothing more.

A string that is one reference and nothing else takes the referred value with its type (a mapping
stays a mapping); an environment variable alone is read as a YAML scalar, so ``${env:RANKS:-4}`` is
a number. Errors in a value that came from the matrix or from vars are shown where that value
stands: ``origins`` remembers it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.source.bounds import MAX_GROWN
from trainchaos.chaos.source.diagnostics import Loc, Problem, unknown
from trainchaos.chaos.source.source import parse

_REFERENCE = re.compile(r"\$\{([^{}]*)\}")
_ENV = re.compile(r"env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ReferenceScope:
    """Names that can be referenced: name -> (value, place). ``env``: the environment variables."""

    matrix: Mapping[str, tuple[Any, Loc]]
    vars: Mapping[str, tuple[Any, Loc]]
    env: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A tree without references. ``origins``: place -> place its value came from; ``used``:
    references found.
    """

    tree: Any
    origins: Mapping[Loc, Loc]
    problems: tuple[Problem, ...]
    used: frozenset[str]

    def origin(self, loc: Loc) -> Loc:
        """Where the value at a place was written."""
        for _ in range(3):  # a value may come from vars, whose value may come from the matrix
            head = next((loc[:n] for n in range(len(loc), -1, -1) if loc[:n] in self.origins), None)
            if head is None:
                break
            loc = self.origins[head] + loc[len(head) :]
        return loc


@dataclass
class _Pass:
    names: ReferenceScope
    origins: dict[Loc, Loc] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    grown: int = 0  # characters that references have put into texts

    def walk(self, value: Any, loc: Loc) -> Any:
        if isinstance(value, dict):
            return {key: self.walk(child, (*loc, key)) for key, child in value.items()}
        if isinstance(value, list):
            return [self.walk(child, (*loc, index)) for index, child in enumerate(value)]
        return self.text(value, loc) if isinstance(value, str) and "${" in value else value

    def text(self, text: str, loc: Loc) -> Any:
        whole = _REFERENCE.fullmatch(text)
        if whole:
            value, origin = self.lookup(whole[1], loc, typed=True)
            if origin is not None:
                self.origins[loc] = origin
            return value
        if "${" in _REFERENCE.sub("", text):
            self.problems.append(Problem(loc, "'${' without its '}'", word="${"))
            return text
        return _REFERENCE.sub(lambda match: self.piece(match[1], loc), text)

    def piece(self, reference: str, loc: Loc) -> str:
        value, _ = self.lookup(reference, loc, typed=False)
        if isinstance(value, dict | list):
            kind = "mapping" if isinstance(value, dict) else "list"
            message = f"${{{reference}}} is a {kind}, and cannot be part of a text"
            self.problems.append(Problem(loc, message, word=f"${{{reference}}}"))
            return ""
        text = (
            str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
        )
        before, self.grown = self.grown, self.grown + len(text)
        if self.grown <= MAX_GROWN:
            return text
        if before <= MAX_GROWN:
            self.problems.append(Problem(loc, f"references make more than {MAX_GROWN} characters"))
        return ""

    def lookup(self, reference: str, loc: Loc, *, typed: bool) -> tuple[Any, Loc | None]:
        self.used.add(reference)
        word = f"${{{reference}}}"
        if match := _ENV.fullmatch(reference):
            return self.environment(match["name"], match["default"], loc, word, typed), None
        scope, _, name = reference.partition(".")
        if scope not in ("matrix", "vars") or not name:
            message = (
                f"cannot read {word}: write ${{matrix.name}}, ${{vars.name}} or"
                " ${env:NAME:-default}"
            )
            self.problems.append(Problem(loc, message, word=word))
            return None, None
        known = self.names.matrix if scope == "matrix" else self.names.vars
        if name not in known:
            self.problems.append(Problem(loc, unknown(f"{scope} name", name, known), word=name))
            return None, None
        return known[name]

    def environment(self, name: str, default: str | None, loc: Loc, word: str, typed: bool) -> Any:
        # ':-' as in the shell: an empty variable counts as unset
        value = self.names.env.get(name) or default
        if value is None:
            message = (
                f"environment variable {name} is not set; set it, or give a default:"
                f" ${{env:{name}:-value}}"
            )
            self.problems.append(Problem(loc, message, word=word))
            return None
        return _scalar(value) if typed else value


def interpolate(tree: Any, names: ReferenceScope, base: Loc = ()) -> Resolved:
    """Replace every reference in ``tree``, which stands at ``base``."""
    work = _Pass(names)
    resolved = work.walk(tree, base)
    return Resolved(
        tree=resolved,
        origins=work.origins,
        problems=tuple(work.problems),
        used=frozenset(work.used),
    )


def _scalar(text: str) -> Any:
    try:
        document = parse(text, "environment")
    except ScenarioError:
        return text
    plain = not document.problems and not isinstance(document.tree, dict | list)
    return document.tree if plain else text
