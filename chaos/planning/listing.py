"""Content of ``chaos list``: names, one line about each, parameters with their defaults."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import BaseModel

from trainchaos.chaos import columns
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.fault.base import Fault, Fidelity, Need
from trainchaos.chaos.loading.builtin import NO_SCENARIOS, PREFIX, scenarios
from trainchaos.chaos.source.source import read_document

_WIDTH = 100
_IN_GROUPS = "root, or a control group that may be written, where ranks are local processes"
_PRIVILEGES: Mapping[Need, str] = {
    Need.MOUNT: "root, to mount a file system, where ranks are local processes",
    Need.CGROUP: _IN_GROUPS,
    Need.MEMORY: _IN_GROUPS,
    Need.QUOTA: _IN_GROUPS,
}


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter of a plugin. ``default`` None with ``required`` means that it must be given."""

    name: str
    type: str
    default: Any
    required: bool
    description: str


@dataclass(frozen=True, kw_only=True)
class ListingEntry:
    """Something that can be named. ``summary``: one sentence; ``about``: all that its docstring
    says; ``columns``: short facts shown between name and summary, by heading.
    """

    name: str
    summary: str
    about: str = ""
    parameters: tuple[Parameter, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)


def first_sentence(documented: object) -> str:
    """The first sentence of a docstring on one line, without its full stop, or ""."""
    paragraph = " ".join((inspect.getdoc(documented) or "").split("\n\n", 1)[0].split())
    return paragraph.split(". ", 1)[0].removesuffix(".")


def whole_docstring(documented: object) -> str:
    """A docstring with each paragraph on one line, or ""; a list keeps its lines."""
    text = (inspect.getdoc(documented) or "").replace("``", "`")
    return "\n\n".join(
        paragraph if "\n- " in f"\n{paragraph}" else " ".join(paragraph.split())
        for paragraph in text.split("\n\n")
    )


def model_entry(name: str, model: type[BaseModel]) -> ListingEntry:
    """A plugin model as an entry; types and defaults come from its JSON Schema, in YAML terms."""
    schema = model.model_json_schema()
    required = set(schema.get("required", ()))
    parameters = tuple(
        Parameter(
            name=field,
            type=_type(definition),
            default=definition.get("default"),
            required=field in required,
            description=str(definition.get("description", "")),
        )
        for field, definition in schema.get("properties", {}).items()
    )
    return ListingEntry(
        name=name,
        summary=first_sentence(model) if model.__doc__ else "",
        about=whole_docstring(model) if model.__doc__ else "",
        parameters=parameters,
    )


class LauncherAbilities(Protocol):
    """Abilities of a launcher; see ``harness.launch.launcher.Launcher``."""

    simulates: ClassVar[bool]
    offers: ClassVar[frozenset[Need]]
    real: ClassVar[frozenset[Need]]


def fault_entry(
    name: str, kind: type[Fault], launchers: Mapping[str, type[LauncherAbilities]]
) -> ListingEntry:
    """A fault kind, with its fidelity under each launcher."""
    columns = {"acts on": kind.where.value}
    for launcher, able in launchers.items():
        if kind.needs - able.offers or (able.simulates and not kind.simulated):
            columns[launcher] = "-"
        elif able.simulates:
            columns[launcher] = "simulated"
        elif kind.needs & able.real:
            columns[launcher] = Fidelity.REAL.value
        else:
            columns[launcher] = kind.fidelity.value
            if by := sorted(kind.may_need & able.real):
                columns[launcher] += f" (real by {', '.join(by)})"
            if kind.on_cuda not in (None, kind.fidelity):
                columns[launcher] += f" ({kind.on_cuda.value} on CUDA)"
    entry = model_entry(name, kind)
    asked = sorted({_PRIVILEGES[need] for need in kind.needs if need in _PRIVILEGES})
    about = "\n\n".join([entry.about, *(f"Needs {privilege}." for privilege in asked)])
    return replace(entry, columns=columns, about=about)


def scenario_entries(directory: Path) -> list[ListingEntry]:
    """The scenarios that come with this program by their names, and the files of a directory by
    path, with their descriptions; unreadable ones say so.
    """
    here = {
        str(path): path
        for path in sorted(directory.rglob("*.yaml"))
        if not path.name.endswith(NO_SCENARIOS)
    }
    known = set(scenarios().values())
    named = {f"{PREFIX}{name}": path for name, path in scenarios().items()}
    named |= {name: path for name, path in here.items() if path.resolve() not in known}
    entries = []
    for name, path in named.items():
        try:
            description = str(read_document(path).tree.get("description", ""))
        except ScenarioError:
            description = f"cannot be read: try 'chaos validate {path}'"
        entries.append(ListingEntry(name=name, summary=description.split("\n", 1)[0]))
    return entries


def as_text(
    found: Mapping[str, Sequence[ListingEntry]], *, verbose: bool, width: int | None = None
) -> str:
    """Lines for people; headings when there are several kinds. ``width``: of a terminal."""
    lines: list[str] = []
    for kind, entries in found.items():
        if len(found) > 1:
            lines += [*([""] if lines else []), kind]
        indent = "  " if len(found) > 1 else ""
        if not entries:
            lines.append(f"{indent}none here")
        rows = [[entry.name, *entry.columns.values(), entry.summary] for entry in entries]
        heads = (
            [["name", *entries[0].columns, "what it is"]] if entries and entries[0].columns else []
        )
        laid = columns.laid_out([*heads, *rows], width=width, indent=indent, headed=bool(heads))
        lines += [line for block in laid[: len(laid) - len(rows)] for line in block]
        for entry, block in zip(entries, laid[len(laid) - len(rows) :], strict=True):
            lines += block
            if verbose:
                lines += _about(entry, f"{indent}    ", width)
                for parameter in entry.parameters:
                    said = f"{indent}    {_parameter(parameter)}".rstrip()
                    lines += columns.fold(said, width, f"{indent}      ")
    return "\n".join(lines)


def _about(entry: ListingEntry, indent: str, width: int | None) -> list[str]:
    """The docstring, wrapped; nothing where the summary has all of it."""
    if entry.about.removesuffix(".") == entry.summary:
        return []
    return [
        wrapped
        for line in entry.about.split("\n")
        for wrapped in textwrap.wrap(
            line,
            min(_WIDTH, width or _WIDTH),
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
    ]


def _parameter(parameter: Parameter) -> str:
    default = "required" if parameter.required else f"default {_yaml(parameter.default)}"
    return f"{parameter.name}: {parameter.type}, {default}  {parameter.description}"


def _yaml(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type(definition: Mapping[str, Any]) -> str:
    if "enum" in definition or "const" in definition:
        return " | ".join(map(str, definition.get("enum", [definition.get("const")])))
    if "anyOf" in definition:
        return " | ".join(_type(each) for each in definition["anyOf"])
    names = {
        "integer": "whole number",
        "string": "text",
        "boolean": "true | false",
        "null": "none",
        "array": "list",
    }
    kind = str(definition.get("type", "value"))
    return names.get(kind, kind)
