"""The points of one SLA clause against its limit, as a small inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from trainchaos.harness.judge.results import SlaResult
from trainchaos.reports.content.figures import parse_clause, plural, quantity, with_unit

WIDTH, HEIGHT, PAD = 170.0, 26.0, 7.0
NEVER_ROOM = 14.0
MAX_HINTS = 100


def strip(sla: SlaResult) -> Markup:
    """Every value as a point, the limit as a line, the forbidden side shaded; infinity is an arrow.
    Empty without values.
    """
    if not sla.values:
        return Markup("")
    clause = parse_clause(sla.clause)
    limit = clause.limit if clause else None
    forbidden = (
        {"<": "right", "<=": "right", ">": "left", ">=": "left"}.get(clause.op) if clause else None
    )
    scale = _Scale(
        [v for v in sla.values if math.isfinite(v)] + ([limit] if limit is not None else [])
    )
    middle = HEIGHT / 2
    parts = [
        Markup('<line class="axis" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
            PAD, WIDTH - PAD, middle, middle
        )
    ]
    if limit is not None:
        parts += _limit(scale(limit), forbidden)
    for at, value in enumerate(sla.values):
        words = _said(sla, at, value) if at < MAX_HINTS else ""
        parts.append(_point(scale, value, _breaks(value, limit, forbidden), middle, words))
    label = _label(sla, limit)
    return Markup(
        '<svg class="strip" viewBox="0 0 {} {}" role="img"'
        ' aria-label="{}"><title>{}</title>{}</svg>'
    ).format(_n(WIDTH), _n(HEIGHT), label, label, Markup("").join(parts))


class _Scale:
    """Maps values to horizontal positions; always includes zero, and keeps room for infinity at the
    end.
    """

    def __init__(self, values: Sequence[float]) -> None:
        low, high = min([0.0, *values]), max([0.0, *values])
        self._low, self._span = low, (high - low) * 1.08 or 1.0

    def __call__(self, value: float) -> float:
        return PAD + (value - self._low) / self._span * (WIDTH - 2 * PAD - NEVER_ROOM)


def _limit(x: float, forbidden: str | None) -> list[Markup]:
    line = Markup('<line class="limit" x1="{0}" x2="{0}" y1="2" y2="{1}"/>').format(
        _n(x), _n(HEIGHT - 2)
    )
    if forbidden is None:
        return [line]
    start, end = (x, WIDTH - PAD) if forbidden == "right" else (PAD, x)
    area = Markup('<rect class="forbidden" x="{}" y="5" width="{}" height="{}"/>').format(
        _n(start), _n(max(end - start, 0.0)), _n(HEIGHT - 10)
    )
    return [area, line]


def _breaks(value: float, limit: float | None, forbidden: str | None) -> bool:
    if limit is None or forbidden is None:
        return math.isinf(value)
    return value > limit if forbidden == "right" else value < limit


def _point(scale: _Scale, value: float, broken: bool, y: float, words: str) -> Markup:
    kind = "point out" if broken else "point"
    hint = Markup("<title>{}</title>").format(words) if words else Markup("")
    if math.isinf(value):
        x = WIDTH - PAD - 7
        return Markup('<path class="{}" d="M{} {}l7 4.5l-7 4.5z">{}</path>').format(
            kind, _n(x), _n(y - 4.5), hint
        )
    return Markup('<circle class="{}" cx="{}" cy="{}" r="3.4">{}</circle>').format(
        kind, _n(scale(value)), _n(y), hint
    )


def _said(sla: SlaResult, at: int, value: float) -> str:
    """``recovery_time 0.136 s; recovery=hot-spare, repeat 0``; older results do not tell the
    repeat.
    """
    repeat = f", repeat {sla.arms[at]}" if at < len(sla.arms) else ""
    return f"{sla.metric} {with_unit(value, sla.unit)}; {sla.cell}{repeat}"


def _label(sla: SlaResult, limit: float | None) -> str:
    values = ", ".join(quantity(v, sla.unit) for v in sla.values)
    against = f" against the limit {with_unit(limit, sla.unit)}" if limit is not None else ""
    count = plural(1, "value") if sla.counted == "1" else f"{sla.counted} values"
    return f"{count}{against}: {values}"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
