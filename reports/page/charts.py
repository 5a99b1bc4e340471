"""Charts of rows that share a scale: values as points, phases and shares of time as bars. Their SVG
has positions in percent, so that marks and letters keep their size in a narrow window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from trainchaos.chaos.units import number, percent, percents
from trainchaos.harness.judge.incident import PHASE_NAMES, PhaseSpan

ROOM = 82.0
"""Percent of the width for finite values; the rest is for values that never came."""
HIGH = 28
MAX_HINTS = 300
"""Points of a row with words of their own."""
ARROW = "M-4 -4.5l8 4.5l-8 4.5z"
CIRCLE = "M-3.3 0a3.3 3.3 0 1 0 6.6 0a3.3 3.3 0 1 0 -6.6 0"
DIAMOND = "M0 -5l5 5l-5 5l-5 -5z"
HATCHES = {
    "abort": "M2 0V6",
    "regroup": "M0 6L6 0M-1 1L1 -1M5 7L7 5",
    "redo": "M0 0L6 6M-1 5L1 7M5 -1L7 1",
    "checkpoint-save": "M0 3H6",
    "spare-idle": "M0 6L6 0M-1 1L1 -1M5 7L7 5",
    "straggling": "M0 0L6 6M0 6L6 0",
    "recomputation": "M0 0L6 6M-1 5L1 7M5 -1L7 1",
    "shutdown": "M0 3H6M3 0V6",
    "other": "M0 3H2",
    "unexplained": "M0 3H2",
}
# In order of an arm's life: start, steady work, fault and repair, rest.
WALL_CLASSES = (
    "useful",
    "initialisation",
    "data",
    "checkpoint save",
    "detection",
    "regroup",
    "restore",
    "recomputation",
    "degraded world",
    "straggling",
    "spare idle",
    "shutdown",
    "other",
)


@dataclass(frozen=True, kw_only=True)
class ChartRow:
    """One row: name, drawing, and the number it stands for."""

    name: str
    drawing: Markup
    value: Markup | str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Rows that share a scale; ``ruler``: the axis above them, hidden from readers; ``keys``:
    (class, word).
    """

    title: str
    ruler: Markup
    lines: tuple[ChartRow, ...]
    keys: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Point:
    """A value of a row. ``flagged``: far from the others; ``words``: shown when it is pointed at;
    ``out``: drawn filled.
    """

    value: float
    words: str = ""
    flagged: bool = False
    out: bool = False


@dataclass(frozen=True, kw_only=True)
class Times:
    """Values of a row, with their median and its interval."""

    name: str
    points: Sequence[Point]
    median: float | None
    bounds: tuple[float, float] | None
    value: Markup | str


@dataclass(frozen=True, kw_only=True)
class Course:
    """An incident phase by phase; ``ends``: its recovery time; ``words``: which one it is."""

    name: str
    phases: Sequence[PhaseSpan]
    ends: float | None
    words: str
    value: Markup | str


def times(title: str, rows: Sequence[Times], *, logarithmic: bool, unit: str = "s") -> Chart:
    """Every value of every row."""
    every = [point.value for row in rows for point in row.points]
    every += [end for row in rows for end in row.bounds or ()]
    scale = AxisScale(every, logarithmic=logarithmic)
    lines = []
    for row in rows:
        said = ", ".join(number(point.value, "lower") for point in row.points)
        parts = [grid(scale)]
        if row.bounds is not None:
            low, high = (scale.at(end) for end in row.bounds)
            parts.append(line("interval", low, high, 14, 14))
        if row.median is not None and math.isfinite(row.median):
            at = scale.at(row.median)
            parts.append(line("median", at, at, 3, 25))
        many = len(row.points) > 1
        for index, point in enumerate(row.points):
            y = 14 + ((-5, 0, 5)[index % 3] if many else 0)
            parts.append(mark(scale, point, y, hint=index < MAX_HINTS))
        words = f"{row.name}: {len(row.points)} values in {unit}: {said}"
        drawn = drawing("strip-row", words, parts)
        lines.append(ChartRow(name=row.name, drawing=drawn, value=row.value))
    shown = f"{unit}, logarithmic" if logarithmic else unit
    return Chart(title=title, ruler=ruler(scale, shown, math.inf in every), lines=tuple(lines))


def courses(title: str, rows: Sequence[Course]) -> Chart:
    """The phases of an incident one after the other, an arrow where it never ended."""
    ends = [phase.start + phase.seconds for row in rows for phase in row.phases]
    scale = AxisScale(ends, logarithmic=False)
    never = any(row.ends == math.inf for row in rows)
    lines = []
    for row in rows:
        parts, said = [grid(scale)], []
        for phase in row.phases:
            words = f"{phase.name} {number(phase.seconds, 'lower', 1e-4)} s"
            said.append(words)
            parts += _bar(scale, phase.start, phase.seconds, phase.name, f"{words}; {row.words}")
        if row.ends == math.inf:
            parts.append(mark(scale, Point(value=math.inf), 14))
        drawn = drawing("bars", f"{row.name}, {row.words}: {', '.join(said)}", parts)
        lines.append(ChartRow(name=row.name, drawing=drawn, value=row.value))
    names = {phase.name for row in rows for phase in row.phases}
    ordered = [p for p in PHASE_NAMES if p in names] + sorted(names - set(PHASE_NAMES))
    return Chart(
        title=title,
        ruler=ruler(scale, "s since the fault", never),
        lines=tuple(lines),
        keys=tuple((slug(name), name) for name in ordered),
    )


def shares(title: str, rows: Mapping[str, Mapping[str, float]]) -> Chart:
    """Stacked seconds of each class of wall time, ``useful`` first: the rest is badput. The title
    is completed by what useful time is, and what most of the rest is.
    """
    lost: dict[str, float] = {}
    for name, seconds in (part for row in rows.values() for part in row.items()):
        if name != "useful":
            lost[name] = lost.get(name, 0.0) + seconds
    useful = {
        label: row.get("useful", 0.0) / (sum(row.values()) or 1.0) for label, row in rows.items()
    }
    title += f" is {percents(min(useful.values()), max(useful.values()))}"
    if lost and max(lost.values()) > 0:
        title += f"; most of the rest is {max(lost, key=lambda name: lost[name])}"
    values = {label: percent(share) for label, share in useful.items()}
    return stacked(title, rows, values, in_order(lost | {"useful": 0.0}), "s", "s; useful, %")


def stacked(
    title: str,
    rows: Mapping[str, Mapping[str, float]],
    values: Mapping[str, str],
    names: Sequence[str],
    unit: str,
    axis: str,
) -> Chart:
    """Bars one after the other. ``values``: beside each row; ``names``: of all bars, in order."""
    scale = AxisScale([sum(row.values()) for row in rows.values()], logarithmic=False, room=98.0)
    lines = []
    for label, row in rows.items():
        parts, left = [grid(scale)], 0.0
        for name, size in row.items():
            parts += _bar(scale, left, size, name, f"{name} {number(size)} {unit}; {label}")
            left += max(size, 0.0)
        said = ", ".join(f"{name} {number(size)}" for name, size in row.items())
        drawn = drawing("bars", f"{label}, mean, in {unit}: {said}", parts)
        lines.append(ChartRow(name=label, drawing=drawn, value=values[label]))
    used = [name for name in names if any(name in row for row in rows.values())]
    keys = tuple((slug(name), name) for name in used)
    return Chart(title=title, ruler=ruler(scale, axis, False), lines=tuple(lines), keys=keys)


def in_order(classes: Mapping[str, object]) -> list[str]:
    """Classes of wall time as an arm lives through them; those that are not known last."""
    known = [name for name in WALL_CLASSES if name in classes]
    return known + [name for name in classes if name not in WALL_CLASSES]


def slug(name: str) -> str:
    """The CSS class name of a phase or of a class of lost time."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def patterns() -> Markup:
    """The hatches shared by all bars, placed once on the page."""
    drawn = Markup("").join(
        Markup(
            '<pattern id="hatch-{}" width="6" height="6" patternUnits="userSpaceOnUse">'
            '<path class="hatch" d="{}"/></pattern>'
        ).format(name, path)
        for name, path in HATCHES.items()
    )
    return Markup(
        '<svg class="defs" width="0" height="0" aria-hidden="true"><defs>{}</defs></svg>'
    ).format(drawn)


class AxisScale:
    """Maps values to percent of the width, linearly or logarithmically over whole decades; infinity
    is rightmost. ``zero``: a linear scale begins at 0.
    """

    def __init__(
        self,
        values: Sequence[float],
        *,
        logarithmic: bool = False,
        room: float = ROOM,
        zero: bool = True,
    ) -> None:
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not logarithmic)]
        self.logarithmic, self._room = logarithmic, room
        ends = [*finite, 0.0] if zero or not finite else finite
        self.low, self.high = min(ends), max(ends) * (1.02 if zero else 1.0)
        if logarithmic:
            low, high = (min(finite), max(finite)) if finite else (1.0, 1.0)
            self.low = math.floor(math.log10(low) + 1e-9)
            self.high = math.ceil(math.log10(high) - 1e-9)
        if self.high <= self.low:
            self.high = self.low + 1.0

    def at(self, value: float) -> float:
        """Percent."""
        if math.isinf(value):
            return 97.0 if value > 0 else 1.0
        if self.logarithmic:
            value = math.log10(value) if value > 0 else self.low
        share = (value - self.low) / (self.high - self.low)
        return min(max(share * self._room, 0.0), self._room) + 1.0

    def ticks(self) -> list[float]:
        """Positions of grid lines: decades, or about five round numbers."""
        if self.logarithmic:
            step = math.ceil((self.high - self.low) / 6)
            return [10.0**e for e in range(int(self.low), int(self.high) + 1, step)]
        raw = (self.high - self.low) / 4
        unit = 10.0 ** math.floor(math.log10(raw))
        size = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
        first, last = math.ceil(self.low / size - 1e-9), math.floor(self.high / size + 1e-9)
        return [i * size for i in range(first, last + 1)]


def ruler(scale: AxisScale, unit: str, never: bool) -> Markup:
    """The axis above rows that share a scale."""
    words = [(scale.at(tick), f"{tick:g}") for tick in scale.ticks()]
    words += [(scale.at(math.inf), "never")] if never else []
    drawn = Markup("").join(
        Markup('<text x="{}%" y="13">{}</text>').format(short(at), text) for at, text in words
    )
    return Markup(
        '<svg class="ruler" height="18" aria-hidden="true">{}</svg><span class="unit">{}</span>'
    ).format(drawn, unit)


def grid(scale: AxisScale, high: int = HIGH) -> Markup:
    """Lines at the ticks."""
    places = (scale.at(tick) for tick in scale.ticks())
    return Markup("").join(line("grid", at, at, 0, high) for at in places)


def line(kind: str, left: float, right: float, top: float, bottom: float) -> Markup:
    """From one point to another, horizontally in percent."""
    return Markup('<line class="{}" x1="{}%" x2="{}%" y1="{}" y2="{}"/>').format(
        kind, short(left), short(right), short(top), short(bottom)
    )


def mark(scale: AxisScale, point: Point, y: float, *, hint: bool = True) -> Markup:
    """A value as a circle, an outlier as a diamond, infinity as an arrow."""
    never = math.isinf(point.value)
    kind = "point out" if point.out or never else "point"
    shape = ARROW if never else DIAMOND if point.flagged else CIRCLE
    return placed(scale.at(point.value), y, kind, shape, point.words if hint else "")


def placed(at: float, y: float, kind: str, shape: str, words: str = "") -> Markup:
    """A path around a point that lies ``at`` percent of the width, with words to point at."""
    return Markup(
        '<svg x="{}%" y="{}" overflow="visible"><path class="{}" d="{}">{}</path></svg>'
    ).format(short(at), short(y), kind, shape, hinted(words))


def hinted(words: str) -> Markup:
    """What is shown when a mark is pointed at."""
    return Markup("<title>{}</title>").format(words) if words else Markup("")


def drawing(kind: str, words: str, parts: Sequence[Markup], high: int = HIGH) -> Markup:
    """A whole drawing, with the words that stand for it."""
    return Markup(
        '<svg class="{0}" height="{1}" role="img" aria-label="{2}"><title>{2}</title>{3}</svg>'
    ).format(kind, high, words, Markup("").join(parts))


def box(
    kind: str, left: float, right: float, top: float, high: float, words: str = "", fill: str = ""
) -> Markup:
    """A filled rectangle, from ``left`` to ``right`` percent."""
    style = Markup(' style="fill: {}"').format(fill) if fill else ""
    width = short(max(right - left, 0.0))
    return Markup('<rect class="{}"{} x="{}%" y="{}" width="{}%" height="{}">{}</rect>').format(
        kind, style, short(left), short(top), width, short(high), hinted(words)
    )


def _bar(scale: AxisScale, start: float, seconds: float, name: str, words: str) -> list[Markup]:
    left, right = scale.at(max(start, 0.0)), scale.at(max(start, 0.0) + max(seconds, 0.0))
    kind = slug(name)
    thin = " thin" if right - left < 0.6 else ""
    drawn = [box(f"c-{kind}{thin}", left, right, 7, 14, words)]
    if kind in HATCHES:
        drawn.append(box("hatched", left, right, 7, 14, words, fill=f"url(#hatch-{kind})"))
    return drawn


def short(value: float) -> str:
    """A position, without digits that nobody sees."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
