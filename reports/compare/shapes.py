"""Small hand-made SVG drawings, with positions in percent so that marks and letters keep their size
in a narrow window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from trainchaos.harness.compare.result.model import OutcomeClass
from trainchaos.harness.judge.incident import PhaseSpan

ROOM = 82.0
"""Percent of the width for finite values; the rest is for values that never came."""
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
}
_ICONS: dict[OutcomeClass, str] = {
    "masked": (
        '<circle class="line" cx="8" cy="8" r="6"/><circle class="fill" cx="8" cy="8" r="3"/>'
    ),
    "recovered": '<circle class="fill" cx="8" cy="8" r="6.5"/>',
    "degraded": (
        '<circle class="line" cx="8" cy="8" r="6"/><path class="fill" d="M2 8a6 6 0 0 0 12 0z"/>'
    ),
    "rolled back": '<path class="fill" d="M2 8L13 1.5V14.5z"/>',
    "started over": '<path class="line" d="M3 2v12M13.5 2.5L6 8l7.5 5.5z"/>',
    "all ranks died": '<path class="thick" d="M3 3l10 10M13 3L3 13"/>',
    "hung": '<path class="thick" d="M5 2.5v11M11 2.5v11"/>',
    "committed bad values": (
        '<path class="line" d="M8 1l7 13H1z"/><path class="line" d="M8 6v4M8 11.4v1.4"/>'
    ),
    "not landed": '<circle class="line dashed" cx="8" cy="8" r="6"/>',
    "not offered": '<path class="line" d="M3 8h10"/>',
    "refuted": (
        '<circle class="line dashed" cx="8" cy="8" r="6"/><path class="line" d="M5 5l6 6M11 5l-6'
        ' 6"/>'
    ),
}


def slug(name: str) -> str:
    """The CSS class name of a phase or of a class of lost time."""
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def icon(outcome: OutcomeClass) -> Markup:
    """The shape of an outcome, hidden from screen readers because the word stands beside it."""
    return Markup('<svg class="icon" viewBox="0 0 16 16" aria-hidden="true">{}</svg>').format(
        Markup(_ICONS[outcome])
    )


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
    """Maps values to percent of the width, linearly from 0 or logarithmically over whole decades;
    infinity is rightmost.
    """

    def __init__(self, values: Sequence[float], *, logarithmic: bool, room: float = ROOM) -> None:
        finite = [v for v in values if math.isfinite(v) and (v > 0 or not logarithmic)]
        self.logarithmic, self._room = logarithmic, room
        self.low, self.high = 0.0, max([*finite, 0.0]) * 1.02 or 1.0
        if logarithmic:
            low, high = (min(finite), max(finite)) if finite else (1.0, 1.0)
            self.low, self.high = (
                math.floor(math.log10(low) + 1e-9),
                math.ceil(math.log10(high) - 1e-9),
            )
            self.high += self.high == self.low

    def at(self, value: float) -> float:
        """Percent."""
        if math.isinf(value):
            return 97.0 if value > 0 else 1.0
        if self.logarithmic:
            value = math.log10(value) if value > 0 else self.low
        return (
            min(max((value - self.low) / (self.high - self.low) * self._room, 0.0), self._room)
            + 1.0
        )

    def ticks(self) -> list[float]:
        """Positions of grid lines: decades, or about five round numbers."""
        if self.logarithmic:
            step = math.ceil((self.high - self.low) / 6)
            return [10.0**e for e in range(int(self.low), int(self.high) + 1, step)]
        raw = self.high / 4
        unit = 10 ** math.floor(math.log10(raw))
        step_size = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw)
        return [i * step_size for i in range(int(self.high / step_size) + 1)]


def ruler(scale: AxisScale, unit: str, never: bool) -> Markup:
    """The axis above rows that share a scale."""
    words = [
        Markup('<text x="{}%" y="13">{}</text>').format(_n(scale.at(t)), f"{t:g}")
        for t in scale.ticks()
    ]
    if never:
        words.append(Markup('<text x="{}%" y="13">never</text>').format(_n(scale.at(math.inf))))
    return Markup(
        '<svg class="ruler" height="18" aria-hidden="true">{}</svg><span class="unit">{}</span>'
    ).format(Markup("").join(words), unit)


def points(
    scale: AxisScale,
    values: Sequence[tuple[float, bool]],
    middle: float | None,
    bounds: tuple[float, float] | None,
    label: str,
) -> Markup:
    """Every value a circle, an outlier a diamond, infinity an arrow; the median a bar, its interval
    a line.
    """
    parts = [_grid(scale, 28)]
    if bounds is not None:
        parts.append(
            Markup('<line class="interval" x1="{}%" x2="{}%" y1="14" y2="14"/>').format(
                _n(scale.at(bounds[0])), _n(scale.at(bounds[1]))
            )
        )
    if middle is not None and math.isfinite(middle):
        x = _n(scale.at(middle))
        parts.append(Markup('<line class="median" x1="{0}%" x2="{0}%" y1="3" y2="25"/>').format(x))
    for index, (value, flagged) in enumerate(values):
        parts.append(
            _mark(
                _n(scale.at(value)),
                14 + ((-5, 0, 5)[index % 3] if len(values) > 1 else 0),
                value,
                flagged,
            )
        )
    return _drawing("strip-row", 28, label, parts)


def spans(scale: AxisScale, phases: Sequence[PhaseSpan], ends: float | None, label: str) -> Markup:
    """The phases of one incident one after the other; an arrow where it never ended."""
    parts = [_grid(scale, 28)]
    for phase in phases:
        parts += _bar(scale, phase.start, phase.seconds, phase.name, 7, 14)
    if ends is not None and math.isinf(ends):
        parts.append(_mark(_n(scale.at(math.inf)), 14, math.inf, False))
    return _drawing("bars", 28, label, parts)


def shares(scale: AxisScale, parts_of: Sequence[tuple[str, float]], label: str) -> Markup:
    """Stacked seconds of classes, from the left."""
    parts, left = [_grid(scale, 28)], 0.0
    for name, seconds in parts_of:
        parts += _bar(scale, left, seconds, name, 7, 14)
        left += seconds
    return _drawing("bars", 28, label, parts)


def curves(
    control: Sequence[tuple[float, float]], faulted: Sequence[tuple[float, float]], label: str
) -> Markup:
    """Two overlaid lines, the control's broad and grey; stretched to the available width."""
    every = [p for p in (*control, *faulted) if math.isfinite(p[1])]
    if not every:
        return Markup("")
    left, right = min(p[0] for p in every), max(p[0] for p in every)
    low, high = min(p[1] for p in every), max(p[1] for p in every)

    def path(series: Sequence[tuple[float, float]]) -> str:
        inside = [p for p in series if math.isfinite(p[1])]
        return " ".join(
            f"{_n((x - left) / ((right - left) or 1) * 200)},"
            f"{_n(76 - (y - low) / ((high - low) or 1) * 72)}"
            for x, y in inside
        )

    return Markup(
        '<svg class="curve" viewBox="0 0 200 80" preserveAspectRatio="none" role="img"'
        ' aria-label="{0}"><title>{0}</title><polyline class="control" points="{1}"/><polyline'
        ' class="faulted" points="{2}"/></svg>'
    ).format(label, path(control), path(faulted))


def _grid(scale: AxisScale, height: int) -> Markup:
    return Markup("").join(
        Markup('<line class="grid" x1="{0}%" x2="{0}%" y1="0" y2="{1}"/>').format(
            _n(scale.at(t)), height
        )
        for t in scale.ticks()
    )


def _bar(
    scale: AxisScale, start: float, seconds: float, name: str, top: int, height: int
) -> list[Markup]:
    left, right = scale.at(max(start, 0.0)), scale.at(max(start, 0.0) + max(seconds, 0.0))
    box = Markup('x="{}%" y="{}" width="{}%" height="{}"').format(
        _n(left), top, _n(right - left), height
    )
    kind = slug(name)
    thin = " thin" if right - left < 0.6 else ""
    drawn = [Markup('<rect class="c-{}{}" {}/>').format(kind, thin, box)]
    if kind in HATCHES:
        drawn.append(Markup('<rect style="fill: url(#hatch-{})" {}/>').format(kind, box))
    return drawn


def _mark(x: str, y: int, value: float, flagged: bool) -> Markup:
    if math.isinf(value):
        shape = Markup('<path class="point out" d="M-4 -4.5l8 4.5l-8 4.5z"/>')
    elif flagged:
        shape = Markup('<path class="point" d="M0 -5l5 5l-5 5l-5 -5z"/>')
    else:
        shape = Markup('<circle class="point" r="3.3"/>')
    return Markup('<svg x="{}%" y="{}" overflow="visible">{}</svg>').format(x, y, shape)


def _drawing(kind: str, height: int, label: str, parts: Sequence[Markup]) -> Markup:
    return Markup(
        '<svg class="{}" height="{}" role="img" aria-label="{}"><title>{}</title>{}</svg>'
    ).format(kind, height, label, label, Markup("").join(parts))


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
