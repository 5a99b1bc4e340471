"""Pages of the site that are not files of docs: the reference, made from the models of this program
each time the site is built, and the files at the top of the project.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import metrics
import recovery_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from benchmarks import adaptive, planted, published
from tests.mutations.page import listed
from tests.mutations.tables import all_mutations
from trainchaos.chaos.cli import cli
from trainchaos.chaos.commands.list import KINDS, entries
from trainchaos.chaos.events.kinds import REQUIRED, Kind
from trainchaos.chaos.planning.listing import ListingEntry
from trainchaos.recovery.playbook.book import playbook
from trainchaos.recovery.playbook.entry import ABOUT as ACTIONS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
AT_THE_TOP = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
ABOUT = {
    "faults": "What can be injected, and what each launcher makes of it.",
    "strategies": "How a job recovers: `recovery:` of a scenario.",
    "workloads": "What is trained: `workload: {kind: ...}`.",
    "launchers": "Where ranks run: `launcher:`.",
    "checkers": "The invariants that are judged: `invariants:`.",
    "metrics": "What an SLA may name; the formulas are in [metrics](../metrics.md).",
}
_CELL = str.maketrans({"|": r"\|", "\n": " ", "<": "&lt;"})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for kind in KINDS:
        if kind in ABOUT:
            _add(files, config, f"reference/{kind}.md", _listing(kind))
    _add(files, config, "reference/events.md", _events())
    _add(files, config, "reference/playbook.md", _playbook())
    _add(files, config, "reference/cli.md", _command_line())
    _add(files, config, "reference/recovery.md", recovery_reference.page())
    _add(files, config, "reference/mutations.md", _mutations())
    _add(files, config, "reference/adaptive-sweep.md", _sweep())
    _add(files, config, "reference/planted.md", _planted())
    _add(files, config, "reference/recovery-times.md", _recovery_times())
    computed = metrics.page("computed.md.j2").replace("<", "&lt;")
    _add(files, config, "reference/computed.md", computed)
    for name in AT_THE_TOP:
        _add(files, config, name, (ROOT / name).read_text().replace("](docs/", "]("))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files at the top of the project lead to their pages here."""
    for name in AT_THE_TOP:
        markdown = markdown.replace(f"](../{name}", f"]({name}")
    return markdown


def _add(files: Files, config: MkDocsConfig, path: str, content: str) -> None:
    files.append(File.generated(config, path, content=content))


def _listing(kind: str) -> str:
    rows = entries(kind)
    heads = list(rows[0].columns)
    lines = [f"# {kind.capitalize()}", "", ABOUT[kind], ""]
    lines += _table(
        ["name", "what it is", *heads],
        [[_link(row), row.summary, *(row.columns[head] for head in heads)] for row in rows],
    )
    for row in rows:
        if row.about or row.parameters:
            lines += ["", f"## {row.name}", "", row.about.replace("<", "&lt;"), *_parameters(row)]
    return "\n".join(lines) + "\n"


def _link(row: ListingEntry) -> str:
    return f"[{row.name}](#{row.name})" if row.about or row.parameters else f"`{row.name}`"


def _parameters(row: ListingEntry) -> Iterator[str]:
    if not row.parameters:
        return
    yield ""
    yield from _table(
        ["parameter", "type", "default", ""],
        [
            [
                f"`{one.name}`",
                one.type,
                "must be given" if one.required else f"`{one.default}`",
                one.description,
            ]
            for one in row.parameters
        ],
    )


def _events() -> str:
    rows = [
        [f"`{kind}`", ", ".join(f"`{key}`" for key in sorted(REQUIRED.get(kind, ())))]
        for kind in Kind
    ]
    lines = [
        "# Events",
        "",
        "The closed set of events of a log, one JSON line each, and the keys that `data` of each"
        " has at least. Every claim is computed from them.",
        "",
        *_table(["kind", "data"], rows),
    ]
    return "\n".join(lines) + "\n"


def _playbook() -> str:
    heads = ["sign", "meaning", "cause", "whose", "to do", "warns", "note", "sources"]
    rows = [
        [
            _code(entry.matches),
            entry.meaning,
            entry.cause.value,
            entry.blame,
            entry.action.value,
            "yes" if entry.move else "",
            entry.note,
            " ".join(f"[{n}]({source})" for n, source in enumerate(entry.sources, start=1)),
        ]
        for entry in playbook().entries
    ]
    lines = [
        "# Playbook",
        "",
        "Every sign that `chaos explain` knows; [signs of failure](../explain.md) says what the"
        " columns mean.",
        "",
        *_table(heads, rows),
        "",
        "## Actions",
        "",
        *_table(["to do", "means"], [[action.value, text] for action, text in ACTIONS.items()]),
    ]
    return "\n".join(lines) + "\n"


def _sweep() -> str:
    lines = (RESULTS / "adaptive-sweep.jsonl").read_text().splitlines()
    return (
        "# The sweep of adaptive, row by row\n\nGoodput, median (95 % interval where n is 6 or"
        " more), and the paired ratio of adaptive to the fixed strategy with the best median;"
        " [adaptive](../adaptive.md) says what was played.\n\n"
        + adaptive.table(adaptive.gathered(json.loads(line) for line in lines))
        + "\n"
    )


def _recovery_times() -> str:
    return (
        "# Every recovery time\n\nThe time from the fault to the first new step, of every"
        " measurement of [the register](../performance.md). Compare only values of one session:"
        " steps, distance to the last checkpoint, machine and load differ. If a row has a date"
        " alone, the commit was not recorded. `hang-stopped`: a rank stopped by SIGSTOP; `tuned`,"
        " `default`: settings of `chaos compare`.\n\n"
        + published.table(published.load(ROOT / published.REGISTER))
        + "\n"
    )


def _planted() -> str:
    rows = planted.merged(planted.read([planted.RESULTS]))
    return (
        "# Planted defects\n\nHow soon the search finds each; [search](../search.md) says how they"
        " are planted.\n\n" + planted.table(rows)
    )


def _mutations() -> str:
    return (
        "# Mutations\n\nChanges of good logs, each as a bug would make it, and the checker that"
        " must see it (`tests/mutations`); [verdicts](../verdicts.md) has the checkers.\n"
        + listed(all_mutations())
    )


def _code(text: str) -> str:
    """Code in a cell, whatever is in it: between backticks, an escaped bar keeps its escape."""
    plain = (c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)
    return f"<code>{''.join(plain)}</code>"


def _command_line() -> str:
    lines = ["# Command line", "", "As `chaos COMMAND --help` shows it."]
    context = click.Context(cli, info_name="chaos")
    for path, command in _commands(cli, context):
        lines += ["", f"## {path.command_path}", "", "```", command.get_help(path).rstrip(), "```"]
    return "\n".join(lines) + "\n"


def _commands(
    group: click.Group, context: click.Context
) -> Iterator[tuple[click.Context, click.Command]]:
    yield context, group
    for name in sorted(group.commands):
        command = group.commands[name]
        below = click.Context(command, info_name=name, parent=context, max_content_width=100)
        if isinstance(command, click.Group):
            yield from _commands(command, below)
        else:
            yield below, command


def _cell(text: str) -> str:
    return text if text.startswith("<code>") else str(text).translate(_CELL)


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """A table; what separates cells is escaped."""
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join(map(_cell, row)) for row in rows]
    return [f"| {line} |" for line in lines]
