"""Writes a scenario of the facts: YAML with a comment at each value that a person may change."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import dataclass

from trainchaos.chaos.scenario.progress import Progress
from trainchaos.harness.draft.facts import FOUND, MISSING, NOTICE_S, UNSURE, Facts, Finding
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

    def add(self, text: str, *, key: str = "", comment: str = "") -> None:
        """A line, with a comment behind it if there is room, else above it."""
        room = len(text) + len(comment) + 4 <= WIDTH
        if comment and not room:
            self.note(comment, len(text) - len(text.lstrip()))
        self.rows.append(f"{text}  # {comment}" if comment and room else text)
        if key:
            self.lines.setdefault(key, len(self.rows))

    def note(self, comment: str, indent: int = 0) -> None:
        """A comment of its own, in as many lines as it takes."""
        front = f"{' ' * indent}# "
        self.rows += textwrap.wrap(
            comment,
            WIDTH,
            initial_indent=front,
            subsequent_indent=front,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def missing(self, finding: Finding, what: str = "") -> None:
        """That a person has to fill something in, and how."""
        self.note(f"NOT FOUND: {what}{finding.text}", 2)
        self.note(f"{finding.change}.", 2)

    def value(self, finding: Finding, text: str) -> None:
        """A line with where its value is from."""
        if not finding.found:
            self.missing(finding)
        self.add(text, key=finding.key, comment=finding.text if finding.found else "")


def write(facts: Facts, name: str, *, directory: str) -> ScenarioText:
    """The scenario of these facts. ``directory``: of the command, relative to the file."""
    out = _Writer()
    out.note("Written by chaos init from a short watch of the command. Run it with: chaos run FILE")
    out.note("After a run that passed, chaos init --from RUN tightens the limits below.")
    out.add("version: 1")
    out.add(f"name: {name}")
    out.add("workload:")
    _command(out, facts, directory)
    _workload(out, facts)
    _faults(out, facts)
    out.add("invariants: observable", comment="what a command's evidence supports")
    return ScenarioText(text="\n".join(out.rows) + "\n", lines=out.lines)


def _command(out: _Writer, facts: Facts, directory: str) -> None:
    words = [_word(word) for word in facts.command.words]
    row = f"  command: [{', '.join(words)}]"
    long = len(row) > WIDTH
    out.add("  command:" if long else row, key="command")
    for word in words if long else ():
        out.add(f"    - {word}")
    if directory != ".":
        out.add(f"  directory: {_word(directory)}", comment="relative to this file")
    checkpoints = facts.of("checkpoints")
    if checkpoints.needed:
        out.missing(checkpoints, "checkpoints in $CHAOS_SCRATCH, ")
        out.lines["checkpoints"] = len(out.rows)
    if facts.command.env:
        out.add("  env:", key="env")
    kind = facts.command.launched.kind
    for variable, value in facts.command.env.items():
        sends = value.startswith("$CHAOS_SCRATCH")
        note = kind.note if kind and variable in kind.env else ""
        note = "checkpoints go there: each arm has its own directory" if sends else note
        key = "checkpoints" if sends else ""
        out.add(f"    {variable}: {_word(value)}", key=key, comment=note)
    out.lines.setdefault("checkpoints", out.lines["command"])


def _workload(out: _Writer, facts: Facts) -> None:
    progress = _progress_value(facts.proposal.progress)
    out.value(facts.of("ranks"), f"  ranks: {facts.ranks}")
    if facts.group:
        out.add(f"  group: {facts.group}", comment="each replica group counts its ranks from 0")
    out.value(facts.of("steps"), f"  steps: {facts.steps}")
    out.value(facts.of("progress"), f"  progress: {progress}")
    comment = "longest time to the first step, also after a restart"
    out.add(f"  start_deadline: {facts.start_s:g}s", comment=comment)
    comment = "an arm without a step for so long has failed"
    out.add(f"  progress_deadline: {facts.deadline_s:g}s", comment=comment)
    comment = facts.of("restarts").text
    out.add(f"  restarts: {facts.restarts}", key="restarts", comment=comment)


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
    """In YAML's flow style: expressions and files in quotes, and no more than was chosen."""
    if progress is None or progress == "beacon":
        return "beacon"
    said = progress.model_dump(exclude_defaults=True)
    quotes = {key: quoted(said[key]) for key in ("regex", "loss", "file") if key in said}
    return f"{{{', '.join(f'{key}: {value}' for key, value in (said | quotes).items())}}}"


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
