"""The figures of recovery that README.md and docs/ state, each with its n, spread, commit and
machine, from one register.

    python -m benchmarks.published               # compares pages with the register; else exit 1
    python -m benchmarks.published --write       # renders the figures of all pages anew
    python -m benchmarks.published --rows FILE   # an archived comparison, as lines for the register

The register is docs/results/recovery-times.yaml, and docs/results/figures.md.j2 has the blocks that
state its figures: what a page has between ``<!-- figures: NAME -->`` and ``<!-- end -->`` is
rendered from the block of that name. Where a measurement names an archive
(docs/results/*.tar.xz, made by ``chaos compare --archive``), its rows must be those that ``chaos
compare`` derives from that archive.
"""

from __future__ import annotations

import datetime
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Literal

from jinja2 import Environment, StrictUndefined, TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML, YAMLError

from benchmarks.harness import ROOT, markdown, options
from trainchaos.chaos import units
from trainchaos.chaos.errors import ChaosError, ScenarioError
from trainchaos.harness.compare.plan.directory import Directory
from trainchaos.harness.compare.result.archive import unpack
from trainchaos.harness.compare.result.gather import gather
from trainchaos.harness.compare.result.model import Comparison

RESULTS = Path("docs/results")
REGISTER = RESULTS / "recovery-times.yaml"
BLOCKS = RESULTS / "figures.md.j2"
MOST_ARCHIVED = 20 * 2**20
"""Maximum bytes of an archive, as git keeps it forever."""
BLOCK = re.compile(r"<!-- figures: ([\w-]+) -->(.*?)<!-- end -->", re.DOTALL)
PER_S = {"s": 0, "ms": -3}
SILENT = ("not kept", "none, one trial each")
"""Spreads that give no two numbers."""

# ---- the register

Value = Annotated[str, Field(pattern=r"^(\d+(\.\d+)?|never)$")]
"""A number as printed, so that 0.130 stays 0.130; ``never``: a median over values of which more
than half never recovered.
"""


class RegisterModel(BaseModel):
    """Base of the register's models."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(RegisterModel):
    """A measurement of one stack or strategy (``of``) under one fault. ``metric``: recovery, or
    another metric; ``also``: more values of the same trials, by name.
    """

    of: str = Field(min_length=1)
    fault: str = Field(min_length=1)
    metric: str = "recovery"
    n: int = Field(ge=1)
    median: Value
    spread: tuple[Value, Value] | None = None
    also: dict[str, Value] = Field(default={})
    note: str = ""

    @property
    def id(self) -> str:
        """Its id within the measurement."""
        words = [self.of, self.fault, *([] if self.metric == "recovery" else [self.metric])]
        return "/".join(re.sub(r"[^a-z0-9.]+", "-", word.lower()).strip("-") for word in words)

    @property
    def values(self) -> dict[str, str]:
        """Its values that a page states, by name."""
        low_high = dict(zip(("low", "high"), self.spread or (), strict=False))
        values = {"median": self.median, **low_high, **self.also}
        return {name: value for name, value in values.items() if value != "never"}


class Measurement(RegisterModel):
    """Figures of one session. ``what``: the scenario or the benchmark; ``commit``: of the code,
    empty: unknown, with the date instead; ``machine``: one of the register's; ``source``: the
    command, or another origin; ``archive``: file below docs/results with the runs;
    ``superseded_by``: the newer measurement of the same, if a page still shows the old one beside
    it; ``spread``: meaning of the two numbers beside a median, unless a figure's note says
    otherwise.
    """

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    what: str = Field(min_length=1)
    date: datetime.date
    commit: str = Field(default="", pattern=r"^([0-9a-f]{7,40})?$")
    machine: str
    source: str = Field(min_length=1)
    archive: str = Field(default="", pattern=r"^([\w.-]+\.tar\.xz)?$")
    superseded_by: str = ""
    unit: Literal["s", "ms"] = "s"
    spread: Literal["quartiles", "range", "95 % interval", "not kept", "none, one trial each"]
    figures: list[Figure] = Field(min_length=1)

    @model_validator(mode="after")
    def _spreads_are_said(self) -> Measurement:
        silent = self.spread in SILENT
        for figure in self.figures:
            if silent and figure.spread is not None:
                raise ValueError(
                    f"{figure.id} has a spread, where the measurement says {self.spread!r}"
                )
            if not silent and figure.spread is None and figure.n > 1 and not figure.note:
                raise ValueError(
                    f"{figure.id} has no spread of its {figure.n} values: give it, or say why in"
                    " its note"
                )
        return self


class Register(RegisterModel):
    """``machines``: name -> description."""

    machines: dict[str, str]
    measurements: list[Measurement]

    @model_validator(mode="after")
    def _names_are_known(self) -> Register:
        ids = {measurement.id for measurement in self.measurements}
        for name, count in Counter(id for id, _ in self.every()).items():
            if count > 1:
                raise ValueError(f"{name} is there {count} times")
        for of in self.measurements:
            if of.machine not in self.machines:
                machines = ", ".join(self.machines)
                raise ValueError(f"{of.id}: machine {of.machine!r} is none of {machines}")
            if of.superseded_by and of.superseded_by not in ids:
                why = f"no measurement {of.superseded_by!r}, which is to supersede it"
                raise ValueError(f"{of.id}: {why}")
        return self

    def every(self) -> Iterator[tuple[str, Figure]]:
        """All figures with their ids."""
        for measurement in self.measurements:
            for figure in measurement.figures:
                yield f"{measurement.id}/{figure.id}", figure


def load(path: Path) -> Register:
    """Read the register, strictly. Raises ScenarioError: one line for each error."""
    try:
        return Register.model_validate(YAML(typ="base", pure=True).load(path.read_text()))
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from error
    except YAMLError as error:
        raise ScenarioError(f"{path}: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        lines = [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ScenarioError("\n".join(lines)) from error


# ---- what pages state


def pages(root: Path) -> dict[str, str]:
    """Name -> text of README.md and of all pages of docs/."""
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def rendered(register: Register, blocks: str) -> tuple[dict[str, str], list[str]]:
    """The text of each block, by name; and values of the register that neither a block nor the
    site's table states. Raises ScenarioError at a block that asks for what the register does not
    have.
    """
    known = dict(register.every())
    old = tuple(f"{one.id}/" for one in register.measurements if one.superseded_by)
    unstated = {
        (id, name)
        for id, figure in known.items()
        for name in figure.values
        if name in figure.also or figure.metric != "recovery" or id.startswith(old)
    }

    def figure(id: str, name: str = "median") -> str:
        unstated.discard((id, name))
        return str(known[id].n) if name == "n" else known[id].values[name]

    environment = Environment(undefined=StrictUndefined, autoescape=False)
    environment.globals["f"] = figure
    texts = {}
    for name, text in BLOCK.findall(blocks):
        try:
            texts[name] = environment.from_string(text + "|").render()[:-1]
        except (KeyError, TemplateError) as error:
            raise ScenarioError(f"{BLOCKS}: {name}: not in the register: {error}") from error
    return texts, [f"no page states {name} of {id}" for id, name in sorted(unstated)]


def with_figures(page: str, texts: Mapping[str, str]) -> str:
    """The page with its blocks as they are rendered."""
    return BLOCK.sub(
        lambda block: f"<!-- figures: {block[1]} -->{texts.get(block[1], block[2])}<!-- end -->",
        page,
    )


def problems(register: Register, blocks: str, texts: Mapping[str, str]) -> list[str]:
    """Where pages, blocks and register differ, a line each. ``texts``: of the pages, by name."""
    made, differences = rendered(register, blocks)
    placed = set()
    for page, text in texts.items():
        there = BLOCK.findall(text)
        placed |= {name for name, _ in there}
        for name, block in there:
            if name not in made:
                differences.append(f"{page}: {BLOCKS} has no block {name}")
            elif block != made[name]:
                again = "python -m benchmarks.published --write"
                differences.append(f"{page}: figures {name} are not those of the register: {again}")
        if text.count("<!-- figures:") != len(there):
            differences.append(f"{page}: a block of figures without a name or an end")
    return [*differences, *(f"no page has block {name}" for name in made if name not in placed)]


def table(register: Register) -> str:
    """All recovery times that are not superseded in one table in seconds, similar ones together;
    single trials, one line per stack.
    """
    head = ["fault", "recovery of", "median s", "n", "spread", "measured with", "commit", "machine"]
    rows, single = [], []
    valid = [measurement for measurement in register.measurements if not measurement.superseded_by]
    for of in valid:
        figures = [figure for figure in of.figures if figure.metric == "recovery"]
        when = f"{of.commit}, {of.date}" if of.commit else f"{of.date}"
        source = [of.what, when, of.machine]
        if of.spread == SILENT[1]:
            stacks = defaultdict(list)
            for figure in figures:
                stacks[figure.of].append(figure)
            for name, group in stacks.items():
                faults = ", ".join(figure.fault for figure in group)
                values = ", ".join(_seconds(figure.median, of) for figure in group)
                count = "1 each" if len(group) > 1 else "1"
                single.append([faults, name, values, count, "none", *source])
            continue
        for figure in figures:
            low_high = " to ".join(_seconds(value, of) for value in figure.spread or ())
            kind = "none" if figure.n == 1 else figure.note or of.spread
            spread = f"{low_high}, {kind}" if low_high else kind
            median = _seconds(figure.median, of)
            rows.append([figure.fault, figure.of, median, str(figure.n), spread, *source])
    rows.sort(key=lambda row: row[:2])
    used = {measurement.machine for measurement in valid}
    lines = [f"- {name}: {what}" for name, what in register.machines.items() if name in used]
    return "\n".join([markdown(head, [*rows, *single]), "", *lines])


def _seconds(value: str, measurement: Measurement) -> str:
    return value if value == "never" else f"{Decimal(value).scaleb(PER_S[measurement.unit]):f}"


# ---- archives


def archived(path: Path) -> Comparison:
    """The comparison that ``chaos compare`` derives from an archive. Raises LogError if it is
    damaged, or contains anything but plain files of bounded size
    (``harness.compare.result.archive.unpack``).
    """
    with tempfile.TemporaryDirectory(prefix="published-") as away:
        unpack(path, Path(away))
        return gather(Directory(Path(away)))


def rows_of(made: Comparison) -> list[Figure]:
    """The times of each stack under each family, and the ratios of its recovery and step times to
    those of the stack it is compared with, rounded as in the report (``chaos.units``).
    """
    found = []
    for cell in made.cells:
        for metric in ("recovery", "detection", "full rate", "redundancy"):
            of = getattr(cell, metric.replace(" ", "_"))
            if of is not None and of.median is not None:
                found.append(_measured(cell.label, cell.family, metric, of.n, of.median, of.ci95))
    for ratio in made.ratios:
        name = {"recovery": "times", "step_time": "step times"}.get(ratio.metric)
        if name and ratio.value is not None:
            metric = f"{name} {ratio.against}"
            row = ratio.n, ratio.value, ratio.interval
            found.append(_measured(ratio.label, ratio.family, metric, *row))
    return found


def _measured(
    of: str, fault: str, metric: str, n: int, median: float, interval: tuple[float, float] | None
) -> Figure:
    # A time is rounded up; a ratio that shows another stack slower, in that stack's favour.
    better = "higher" if "times " in metric and median > 1 else "lower"
    low_high = units.enclosing(*interval) if interval else None
    text = units.number(median, better)
    return Figure(of=of, fault=fault, metric=metric, n=n, median=text, spread=low_high)


def departures(measurement: Measurement, made: Comparison) -> list[str]:
    """Differences between a measurement and its archive."""
    given = {row.id: row for row in rows_of(made)}
    found = []
    commit = str(made.machine.get("commit", ""))
    if commit and not commit.startswith(measurement.commit or "?"):
        ours = f"the register has commit {measurement.commit or 'none'}"
        found.append(f"{measurement.id}: {ours}, the archive {commit}")
    for figure in measurement.figures:
        row, name = given.get(figure.id), f"{measurement.id}/{figure.id}"
        if row is None:
            found.append(f"{name}: {measurement.archive} has no such row")
        elif _said(figure) != _said(row):
            found.append(f"{name}: the register has {_said(figure)}, the archive {_said(row)}")
    return found


def _said(figure: Figure) -> str:
    return f"{figure.median} [{', '.join(figure.spread or ())}] (n = {figure.n})"


def archives(register: Register, results: Path) -> list[str]:
    """Differences between archives and register: an archive that is too large for git, unnamed or
    missing, and every figure that does not match its archive.
    """
    there = {path.name for path in results.glob("*.tar.xz")}
    named = {of.archive for of in register.measurements if of.archive}
    found = []
    for name in sorted(there ^ named):
        why = "no measurement of the register is of it"
        missing = "the register names it, and it is not there"
        found.append(f"{results / name}: {why if name in there else missing}")
    for name in sorted(named & there):
        if (results / name).stat().st_size > MOST_ARCHIVED:
            found.append(f"{results / name} is larger than {MOST_ARCHIVED} bytes")
            continue
        made = archived(results / name)
        for of in register.measurements:
            found += departures(of, made) if of.archive == name else []
    return found


def yaml_of(rows: Sequence[Figure]) -> str:
    """Rows as the register writes them."""
    lines = []
    for row in rows:
        metric = "" if row.metric == "recovery" else f" metric: {row.metric},"
        spread = f", spread: [{', '.join(row.spread)}]" if row.spread else ""
        value = f"{metric} n: {row.n}, median: {row.median}{spread}"
        lines.append(f"- {{of: {row.of}, fault: {row.fault},{value}}}")
    return "\n".join(lines)


def main() -> int:
    """Check, write the figures, or print the rows of an archive."""
    parser = options(__doc__)
    add = parser.add_argument
    add("--write", action="store_true", help="render the figures of all pages anew")
    add("--rows", type=Path, metavar="FILE", help="print what an archived comparison measured")
    given = parser.parse_args()
    try:
        if given.rows:
            print(yaml_of(rows_of(archived(given.rows))))
            return 0
        register, blocks = load(ROOT / REGISTER), (ROOT / BLOCKS).read_text()
        if given.write:
            made, _ = rendered(register, blocks)
            for name, text in pages(ROOT).items():
                (ROOT / name).write_text(with_figures(text, made))
        found = problems(register, blocks, pages(ROOT)) + archives(register, ROOT / RESULTS)
    except ChaosError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    count = len(list(register.every()))
    print("\n".join(found) or f"{count} figures, each where the register says")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
