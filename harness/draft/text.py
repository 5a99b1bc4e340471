"""Writes a scenario of the facts: YAML with a comment at each value that a person may change."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainchaos.chaos.scenario.progress import PresetProgress, Progress, RegexProgress
from trainchaos.harness.draft.facts import NOTICE_S, Facts, Finding
from trainchaos.harness.script.listen.derive import quoted

WIDTH = 96
_PLAIN = re.compile(r"(?:--?)?[A-Za-z/.$][\w./$=+-]*")
_NOT_TEXT = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


@dataclass(frozen=True, kw_only=True)
class ScenarioText:
    """``text`` of the file; ``lines``: key of a finding -> the line that says it, from 1."""

    text: str
    lines: dict[str, int]


class _Writer:
    """Collects lines."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.lines: dict[str, int] = {}

    def add(self, text: str, *, key: str = "", comment: str = "", indent: int = 0) -> None:
        """A line, with a comment behind it if there is room, else above it."""
        room = len(text) + len(comment) + 4 <= WIDTH
        if comment and not room:
            self.note(comment, indent)
        self.rows.append(f"{text}  # {comment}" if comment and room else text)
        if key:
            self.lines.setdefault(key, len(self.rows))

    def note(self, comment: str, indent: int = 0) -> None:
        """A comment of its own, in as many lines as it takes."""
        line = ""
        for word in comment.split():
            if line and indent + len(line) + len(word) + 3 > WIDTH:
                self.rows.append(f"{' ' * indent}# {line}")
                line = ""
            line = f"{line} {word}" if line else word
        if line:
            self.rows.append(f"{' ' * indent}# {line}")


def write(facts: Facts, name: str, *, directory: str) -> ScenarioText:
    """The scenario of these facts. ``directory``: of the command, relative to the file."""
    out = _Writer()
    out.note("Written by chaos init from a short watch of the command. Run it with: chaos run FILE")
    out.note("After a run that passed, chaos init --from RUN tightens the limits below.")
    out.add("version: 1")
    out.add(f"name: {name}")
    out.add("workload:")
    _command(out, facts, directory)
    _progress(out, facts)
    _faults(out, facts)
    out.add("invariants: observable", comment="what a command's evidence supports")
    return ScenarioText(text="\n".join(out.rows) + "\n", lines=out.lines)


def _command(out: _Writer, facts: Facts, directory: str) -> None:
    words = [_word(word) for word in facts.command.words]
    row = f"  command: [{', '.join(words)}]"
    if len(row) <= WIDTH:
        out.add(row, key="command")
    else:
        out.add("  command:", key="command")
        for word in words:
            out.add(f"    - {word}")
    if directory != ".":
        out.add(f"  directory: {_word(directory)}", comment="relative to this file")
    missing = _missing(facts, "checkpoints")
    if missing is not None and missing.needed:
        out.note(f"NOT FOUND: checkpoints in $CHAOS_SCRATCH, {missing.text}", 2)
        out.note(f"{missing.change}.", 2)
        out.lines["checkpoints"] = len(out.rows)
    if facts.command.env:
        out.add("  env:", key="env")
    for variable, value in facts.command.env.items():
        sends = value.startswith("$CHAOS_SCRATCH")
        note = ""
        if sends:
            note = "checkpoints go there: each arm has its own directory"
        elif facts.command.launched.kind and variable in facts.command.launched.kind.env:
            note = facts.command.launched.kind.note
        key = "checkpoints" if sends else ""
        out.add(f"    {variable}: {_word(value)}", key=key, comment=note, indent=4)
    out.lines.setdefault("checkpoints", out.lines["command"])


def _progress(out: _Writer, facts: Facts) -> None:
    _value(out, facts, "ranks", f"  ranks: {facts.ranks}")
    if facts.group:
        out.add(f"  group: {facts.group}", comment="each replica group counts its ranks from 0")
    _value(out, facts, "steps", f"  steps: {facts.steps}")
    _value(out, facts, "progress", f"  progress: {_progress_value(facts.proposal.progress)}")
    out.add(
        f"  start_deadline: {facts.start_s:g}s",
        comment="longest time to the first step, also after a restart",
        indent=2,
    )
    out.add(
        f"  progress_deadline: {facts.deadline_s:g}s",
        comment="an arm without a step for so long has failed",
        indent=2,
    )
    out.add(
        f"  restarts: {facts.restarts}",
        key="restarts",
        comment=next(one.text for one in facts.findings if one.key == "restarts"),
        indent=2,
    )


def _value(out: _Writer, facts: Facts, key: str, text: str) -> None:
    finding = next(one for one in facts.findings if one.key == key)
    if finding.found:
        out.add(text, key=key, comment=finding.text, indent=2)
        return
    out.note(f"NOT FOUND: {finding.text}", 2)
    out.note(f"{finding.change}.", 2)
    out.add(text, key=key)


def _faults(out: _Writer, facts: Facts) -> None:
    out.note("Three faults, each in a cell of its own: beside each arm with a fault, one without.")
    out.add("matrix:", key="faults")
    out.add("  include:")
    rows = [
        ("process-kill", "null", "a rank dies"),
        ("process-stop", f"{facts.hold_s:g}s", "a rank hangs, and goes on after that time"),
        ("process-term", "null", f"a preemption: SIGTERM, and {NOTICE_S:g} s later SIGKILL"),
    ]
    for kind, lasts, comment in rows:
        out.add(f"    - {{fault: {kind}, lasts: {lasts}}}", comment=comment)
    out.add("faults:")
    out.add("  - id: hit")
    out.add('    kind: "${matrix.fault}"')
    out.add("    target: {select: one}", comment="one rank, drawn from the seed")
    out.add(f"    at: {{step: {facts.at}}}", key="at", comment="in the middle of the run")
    out.add('    duration: "${matrix.lasts}"')
    out.note("Generous: chaos init --from RUN tightens them.")
    out.add("sla:", key="sla")
    out.add("  recovery_time:", comment="from the fault to the first new step")
    for kind, *_ in rows:
        out.add(f'    - {{check: "max < {facts.recovery_limit_s:g}s", fault: {kind}}}')
    comment = "fewer than are done by then: a job that begins again from step 1 loses more"
    if not facts.saves:
        comment = "all: no checkpoint was seen, so it may begin again from step 1"
    out.add(f'  steps_lost: ["max <= {facts.most_lost}"]', key="lost", comment=comment)


def _progress_value(progress: Progress | None) -> str:
    if isinstance(progress, PresetProgress):
        given = progress.model_dump(exclude_none=True)
        given |= {"file": quoted(progress.file)} if progress.file else {}
        return f"{{{', '.join(f'{name}: {value}' for name, value in given.items())}}}"
    if isinstance(progress, RegexProgress):
        loss = f", loss: {quoted(progress.loss)}" if progress.loss else ""
        numbers = progress.model_dump(exclude={"regex", "loss"}, exclude_defaults=True)
        numbers |= {"file": quoted(progress.file)} if progress.file else {}
        said = "".join(f", {name}: {value}" for name, value in numbers.items())
        return f"{{regex: {quoted(progress.regex)}{loss}{said}}}"
    return "beacon"


def _missing(facts: Facts, key: str) -> Finding | None:
    return next((one for one in facts.findings if one.key == key and not one.found), None)


def _word(word: str) -> str:
    plain = _PLAIN.fullmatch(word) and word.lower() not in _NOT_TEXT
    return word if plain else json.dumps(word, ensure_ascii=False)


def shown(facts: Facts, lines: dict[str, int], path: str) -> list[str]:
    """The findings for a person, each with its line and what to change: found, then uncertain (a
    run can do without it), then not found.
    """
    groups = {
        "found": [one for one in facts.findings if one.found],
        "not certain": [one for one in facts.findings if not one.found and not one.needed],
        "not found": [one for one in facts.findings if not one.found and one.needed],
    }
    rows: list[str] = []
    for title, some in groups.items():
        rows += [title] if some else []
        rows += [row for one in some for row in _rows(one, lines, path)]
    return rows


def _rows(one: Finding, lines: dict[str, int], path: str) -> Sequence[str]:
    place = f"  [{path}:{lines[one.key]}]" if one.key in lines else ""
    text = f"{one.value}: {one.text}" if one.value else one.text
    rows = [f"  {one.name:12} {text}{place}"]
    if one.change:
        rows.append(f"  {'':12} -> {one.change}")
    return rows
