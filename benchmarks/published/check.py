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

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path

from jinja2 import Environment, StrictUndefined, TemplateError

from benchmarks.published.register import Figure, Measurement, Register, load
from trainchaos.chaos import units
from trainchaos.chaos.errors import ChaosError, ScenarioError
from trainchaos.harness.compare.plan.directory import Directory
from trainchaos.harness.compare.result.archive import unpack
from trainchaos.harness.compare.result.gather import gather
from trainchaos.harness.compare.result.model import Comparison

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("docs/results")
REGISTER = RESULTS / "recovery-times.yaml"
BLOCKS = RESULTS / "figures.md.j2"
MOST_ARCHIVED = 20 * 2**20
"""Maximum bytes of an archive, as git keeps it forever."""
BLOCK = re.compile(r"<!-- figures: ([\w-]+) -->(.*?)<!-- end -->", re.DOTALL)
PER_S = {"s": 0, "ms": -3}


# what pages state


def pages(root: Path) -> dict[str, str]:
    """Name -> text of README.md and of all pages of docs/."""
    paths = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}


def rendered(register: Register, blocks: str) -> tuple[dict[str, str], list[str]]:
    """The text of each block, by name; and values of the register that neither a block nor the
    site's table states. Raises ScenarioError at a block that asks for what the register does not
    have.
    """
    known = {id: figure for id, _, figure in register.every()}
    unstated = {
        (id, name)
        for id, measurement, figure in register.every()
        for name in figure.values
        if name in figure.also or not _is_tabled(measurement, figure)
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
    placed = []
    for page, text in texts.items():
        for name, block in BLOCK.findall(text):
            placed.append(name)
            if name not in made:
                differences.append(f"{page}: {BLOCKS} has no block {name}")
            elif block != made[name]:
                differences.append(
                    f"{page}: figures {name} are not those of the register: python -m"
                    " benchmarks.published --write"
                )
        if text.count("<!-- figures:") != len(BLOCK.findall(text)):
            differences.append(f"{page}: a block of figures without a name or an end")
    return [*differences, *(f"no page has block {name}" for name in made if name not in placed)]


def table(register: Register) -> str:
    """All recovery times that are not superseded in one table in seconds, similar ones together."""
    head = ["fault", "recovery of", "median s", "n", "spread", "measured with", "commit", "machine"]
    valid = [measurement for measurement in register.measurements if not measurement.superseded_by]
    rows = [
        _row(measurement, figure)
        for measurement in valid
        for figure in measurement.figures
        if _is_tabled(measurement, figure) and not _alone(measurement)
    ]
    rows.sort(key=lambda row: row[:2])
    rows += [row for measurement in valid if _alone(measurement) for row in _folded(measurement)]
    used = {measurement.machine for measurement in valid}
    lines = [f"- {name}: {what}" for name, what in register.machines.items() if name in used]
    marked = [head, ["---"] * len(head), *rows]
    return "\n".join([*("| " + " | ".join(row) + " |" for row in marked), "", *lines])


def _is_tabled(measurement: Measurement, figure: Figure) -> bool:
    return figure.metric == "recovery" and not measurement.superseded_by


def _alone(measurement: Measurement) -> bool:
    return measurement.spread == "none, one trial each"


def _row(measurement: Measurement, figure: Figure) -> list[str]:
    low_high = " to ".join(_seconds(value, measurement) for value in figure.spread or ())
    kind = "none" if figure.n == 1 else figure.note or measurement.spread
    spread = f"{low_high}, {kind}" if low_high else kind
    median = _seconds(figure.median, measurement)
    return [figure.fault, figure.of, median, str(figure.n), spread, *_provenance(measurement)]


def _folded(measurement: Measurement) -> Iterator[list[str]]:
    """Single trials, one line per stack."""
    of: dict[str, list[Figure]] = {}
    for figure in measurement.figures:
        if figure.metric == "recovery":
            of.setdefault(figure.of, []).append(figure)
    for name, group in of.items():
        faults = ", ".join(figure.fault for figure in group)
        values = ", ".join(_seconds(figure.median, measurement) for figure in group)
        count = "1 each" if len(group) > 1 else "1"
        yield [faults, name, values, count, "none", *_provenance(measurement)]


def _seconds(value: str, measurement: Measurement) -> str:
    return value if value == "never" else f"{Decimal(value).scaleb(PER_S[measurement.unit]):f}"


def _provenance(measurement: Measurement) -> list[str]:
    when = f"{measurement.date:%Y-%m-%d}"
    return [
        measurement.what,
        f"{measurement.commit}, {when}" if measurement.commit else when,
        measurement.machine,
    ]


# archives


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
        times = {
            "recovery": cell.recovery,
            "detection": cell.detection,
            "full rate": cell.full_rate,
            "redundancy": cell.redundancy,
        }
        for metric, of in times.items():
            if of is not None and of.median is not None:
                found.append(_measured(cell.label, cell.family, metric, of.n, of.median, of.ci95))
    for ratio in made.ratios:
        name = {"recovery": "times", "step_time": "step times"}.get(ratio.metric)
        if name and ratio.value is not None:
            metric = f"{name} {ratio.against}"
            found.append(
                _measured(ratio.label, ratio.family, metric, ratio.n, ratio.value, ratio.interval)
            )
    return found


def _measured(
    of: str, fault: str, metric: str, n: int, median: float, interval: tuple[float, float] | None
) -> Figure:
    # A time is rounded up; a ratio that shows another stack slower, in that stack's favour.
    better = "higher" if "times " in metric and median > 1 else "lower"
    low_high = units.enclosing(*interval) if interval else None
    return Figure(
        of=of,
        fault=fault,
        metric=metric,
        n=n,
        median=units.number(median, better),
        spread=low_high,
    )


def departures(measurement: Measurement, made: Comparison) -> list[str]:
    """Differences between a measurement and its archive."""
    given = {row.id: row for row in rows_of(made)}
    found = []
    commit = str(made.machine.get("commit", ""))
    if commit and not commit.startswith(measurement.commit or "?"):
        found.append(
            f"{measurement.id}: the register has commit {measurement.commit or 'none'}, the archive"
            f" {commit}"
        )
    for figure in measurement.figures:
        row = given.get(figure.id)
        mine = (figure.n, figure.median, figure.spread)
        if row is None:
            found.append(f"{measurement.id}/{figure.id}: {measurement.archive} has no such row")
        elif mine != (row.n, row.median, row.spread):
            found.append(
                f"{measurement.id}/{figure.id}: the register has {_said(figure)}, the archive"
                f" {_said(row)}"
            )
    return found


def _said(figure: Figure) -> str:
    return f"{figure.median} [{', '.join(figure.spread or ())}] (n = {figure.n})"


def archives(register: Register, results: Path) -> list[str]:
    """Differences between archives and register: an archive that is too large for git, unnamed or
    missing, and every figure that does not match its archive.
    """
    there = {path.name for path in results.glob("*.tar.xz")}
    named = {one.archive for one in register.measurements if one.archive}
    found = [
        f"{results / name}: no measurement of the register is of it"
        for name in sorted(there - named)
    ]
    found += [
        f"{results / name}: the register names it, and it is not there"
        for name in sorted(named - there)
    ]
    for name in sorted(named & there):
        if (results / name).stat().st_size > MOST_ARCHIVED:
            found.append(f"{results / name} is larger than {MOST_ARCHIVED} bytes")
            continue
        made = archived(results / name)
        for measurement in register.measurements:
            found += departures(measurement, made) if measurement.archive == name else []
    return found


def yaml_of(rows: Sequence[Figure]) -> str:
    """Rows as the register writes them."""
    lines = []
    for row in rows:
        metric = "" if row.metric == "recovery" else f" metric: {row.metric},"
        spread = f", spread: [{', '.join(row.spread)}]" if row.spread else ""
        lines.append(
            f"- {{of: {row.of}, fault: {row.fault},{metric} n: {row.n}, median:"
            f" {row.median}{spread}}}"
        )
    return "\n".join(lines)


def main() -> int:
    """Check, write the figures, or print the rows of an archive."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="render the figures of all pages anew")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="print what an archived comparison measured"
    )
    options = parser.parse_args()
    try:
        if options.rows:
            print(yaml_of(rows_of(archived(options.rows))))
            return 0
        register, blocks = load(ROOT / REGISTER), (ROOT / BLOCKS).read_text()
        if options.write:
            made, _ = rendered(register, blocks)
            for name, text in pages(ROOT).items():
                (ROOT / name).write_text(with_figures(text, made))
        found = problems(register, blocks, pages(ROOT)) + archives(register, ROOT / RESULTS)
    except ChaosError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(
        "\n".join(found)
        or f"{sum(1 for _ in register.every())} figures, each where the register says"
    )
    return 1 if found else 0
