"""Writes a scenario of the facts: YAML with a comment at each value that a person may change."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from trainchaos.chaos.scenario.progress import Progress
from trainchaos.harness.draft.findings import FOUND, MISSING, NOTICE_S, UNSURE, Facts
from trainchaos.harness.script.listen.derive import quoted

WIDTH = 96
_PLAIN = re.compile(r"(?:--?)?[A-Za-z/.$][\w./$=+-]*")
_NOT_TEXT = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
Row = tuple[str, str, str]
"""Key of the finding that a line says, the line, its comment."""


@dataclass(frozen=True, kw_only=True)
class ScenarioText:
    """``text`` of the file; ``lines``: key of a finding -> the line that says it, from 1."""

    text: str
    lines: dict[str, int]


def write(facts: Facts, name: str, *, directory: str) -> ScenarioText:
    """The scenario of these facts. ``directory``: of the command, relative to the file."""
    rows: list[str] = []
    lines: dict[str, int] = {}
    for key, text, comment in _rows(facts, name, directory):
        indent = " " * (len(text) - len(text.lstrip()))
        if text.strip() and comment and len(text) + len(comment) + 4 <= WIDTH:
            text += f"  # {comment}"
        elif comment:  # above the line, in as many as it takes
            front = f"{indent}# "
            rows += textwrap.wrap(
                comment,
                WIDTH,
                initial_indent=front,
                subsequent_indent=front,
                break_long_words=False,
                break_on_hyphens=False,
            )
        rows += [text] if text.strip() else []
        if key:
            lines.setdefault(key, len(rows))
    lines.setdefault("checkpoints", lines["command"])
    return ScenarioText(text="\n".join(rows) + "\n", lines=lines)


def _rows(facts: Facts, name: str, directory: str) -> Iterator[Row]:
    about = "Written by chaos init from a short watch of the command. Run it with: chaos run FILE"
    yield "", "", about
    yield "", "", "After a run that passed, chaos init --from RUN tightens the limits below."
    yield "", "version: 1", ""
    yield "", f"name: {name}", ""
    yield "", "workload:", ""
    yield from _command(facts, directory)
    yield from _value(facts, "ranks", str(facts.ranks))
    if facts.group:
        yield "", f"  group: {facts.group}", "each replica group counts its ranks from 0"
    yield from _value(facts, "steps", str(facts.steps))
    yield from _value(facts, "progress", _progress(facts.proposal.progress))
    longest = "longest time to the first step, also after a restart"
    yield "", f"  start_deadline: {facts.start_s:g}s", longest
    failed = "an arm without a step for so long has failed"
    yield "", f"  progress_deadline: {facts.deadline_s:g}s", failed
    yield "restarts", f"  restarts: {facts.restarts}", facts.of("restarts").text
    yield from _faults(facts)
    yield "", "invariants: observable", "what a command's evidence supports"


def _value(facts: Facts, name: str, value: str) -> Iterator[Row]:
    """A value with where it is from, or that a person has to fill it in, and how."""
    finding, comment = facts.of(name), ""
    if finding.state == FOUND:
        comment = finding.text
    else:
        yield "", "  ", f"NOT FOUND: {finding.text}"
        yield "", "  ", f"{finding.change}."
    yield finding.key, f"  {name}: {value}", comment


def _command(facts: Facts, directory: str) -> Iterator[Row]:
    words = [_word(word) for word in facts.command.words]
    line = f"  command: [{', '.join(words)}]"
    if len(line) <= WIDTH:
        yield "command", line, ""
    else:
        yield "command", "  command:", ""
        for word in words:
            yield "", f"    - {word}", ""
    if directory != ".":
        yield "", f"  directory: {_word(directory)}", "relative to this file"
    checkpoints = facts.of("checkpoints")
    if checkpoints.state == MISSING:
        yield "", "  ", f"NOT FOUND: checkpoints in $CHAOS_SCRATCH, {checkpoints.text}"
        yield "checkpoints", "  ", f"{checkpoints.change}."
    if facts.command.env:
        yield "env", "  env:", ""
    kind = facts.command.launched.kind
    for variable, value in facts.command.env.items():
        sends = value.startswith("$CHAOS_SCRATCH")
        note = kind.note if kind and variable in kind.env else ""
        note = "checkpoints go there: each arm has its own directory" if sends else note
        yield "checkpoints" if sends else "", f"    {variable}: {_word(value)}", note


def _faults(facts: Facts) -> Iterator[Row]:
    kinds = {
        "process-kill": ("null", "a rank dies"),
        "process-stop": (f"{facts.hold_s:g}s", "a rank hangs, and goes on after that time"),
        "process-term": ("null", f"a preemption: SIGTERM, and {NOTICE_S:g} s later SIGKILL"),
    }
    beside = "Three faults, each in a cell of its own: beside each arm with a fault, one without."
    yield "", "", beside
    yield "faults", "matrix:", ""
    yield "", "  include:", ""
    for kind, (lasts, comment) in kinds.items():
        yield "", f"    - {{fault: {kind}, lasts: {lasts}}}", comment
    yield "", "faults:", ""
    yield "", "  - id: hit", ""
    yield "", '    kind: "${matrix.fault}"', ""
    yield "", "    target: {select: one}", "one rank, drawn from the seed"
    yield "at", f"    at: {{step: {facts.at}}}", "in the middle of the run"
    yield "", '    duration: "${matrix.lasts}"', ""
    yield "", "", "Generous: chaos init --from RUN tightens them."
    yield "sla", "sla:", ""
    yield "", "  recovery_time:", "from the fault to the first new step"
    for kind in kinds:
        limit = f'"max < {facts.recovery_limit_s:g}s"'
        yield "", f"    - {{check: {limit}, fault: {kind}}}", ""
    comment = "fewer than are done by then: a job that begins again from step 1 loses more"
    if not facts.saves:
        comment = "all: no checkpoint was seen, so it may begin again from step 1"
    yield "lost", f'  steps_lost: ["max <= {facts.most_lost}"]', comment


def _progress(progress: Progress | None) -> str:
    """In YAML's flow style: expressions and files in quotes, and no more than was chosen."""
    if progress is None or progress == "beacon":
        return "beacon"
    chosen = progress.model_dump(exclude_defaults=True)
    quotes = {key: quoted(chosen[key]) for key in ("regex", "loss", "file") if key in chosen}
    return f"{{{', '.join(f'{key}: {value}' for key, value in (chosen | quotes).items())}}}"


def _word(word: str) -> str:
    plain = _PLAIN.fullmatch(word) and word.lower() not in _NOT_TEXT
    return word if plain else json.dumps(word, ensure_ascii=False)


def shown(facts: Facts, lines: dict[str, int], path: str) -> list[str]:
    """The findings for a person, each with its line and what to change: found, then uncertain (a
    run can do without it), then not found.
    """
    rows: list[str] = []
    for state in (FOUND, UNSURE, MISSING):
        some = [one for one in facts.findings if one.state == state]
        rows += [state] if some else []
        for one in some:
            place = f"  [{path}:{lines[one.key]}]" if one.key in lines else ""
            text = f"{one.value}: {one.text}" if one.value else one.text
            rows.append(f"  {one.name:12} {text}{place}")
            rows += [f"  {'':12} -> {one.change}"] if one.change else []
    return rows
