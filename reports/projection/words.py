"""What a projection says, in sentences: best strategies, where they change, what a second costs."""

from __future__ import annotations

from collections.abc import Sequence

from trainchaos.chaos.units import enclosing, percent
from trainchaos.harness.projection.result import BreakEven, Compared, Projected, Projection


def headline(found: Projection) -> str:
    """The best and the worst strategy at the largest size, of those that are measured if any is."""
    if not found.rows:
        inside = sum(one.inside for one in found.compared)
        return f"{inside} of {len(found.compared)} jobs were where they are projected to be"
    largest = max(found.setting.gpus)
    rows = sorted(_comparable(found, largest), key=lambda row: -row.goodput)
    best, worst = rows[0], rows[-1]
    if len(rows) > 1 and not best.point.ahead_of(worst.point):
        names = " and ".join(row.strategy for row in sorted(rows, key=lambda row: row.strategy))
        return f"At {largest:,} GPUs {names} keep {_percent(best.goodput)} of the time alike"
    said = f"At {largest:,} GPUs {best.strategy} keeps {_percent(best.goodput)} of the time"
    if len(rows) == 1:
        return said
    said = f"{said}, {worst.strategy} {_percent(worst.goodput)}"
    saved = worst.lost_gpu_hours - best.lost_gpu_hours
    doubt = _doubted(found, best, worst)
    if saved <= 0:  # with more spares more is paid for
        return said + doubt
    return f"{said}: {saved:,.0f} GPU-hours in {found.setting.days:g} days{doubt}"


def _doubted(found: Projection, one: Projected, other: Projected) -> str:
    return ", not beyond doubt" if found.doubtful(one, other) else ""


def findings(found: Projection) -> list[str]:
    """Where the best strategy changes, what a second costs, of what failures are, and where the
    engines differ.
    """
    if not found.rows:
        return []
    return [
        *_changes(found),
        *_seconds(found),
        *_causes(found),
        *_apart(found),
    ]


def named(found: Projection, strategy: str) -> str:
    """A strategy, marked where its cost is published and others' were measured."""
    published = found.costs[strategy].kind == "published"
    return f"{strategy} (published)" if published and _measured(found) else strategy


def _measured(found: Projection) -> bool:
    return any(cost.kind == "measured" for cost in found.costs.values())


def _comparable(found: Projection, gpus: int) -> list[Projected]:
    """Rows of a size that can be compared: where recoveries were measured, not published ones."""
    rows = at(found, gpus)
    if not _measured(found):
        return rows
    return [row for row in rows if found.costs[row.strategy].kind != "published"]


def _percent(share: float) -> str:
    """That no line is broken before the sign."""
    return percent(share).replace(" ", "\u00a0")


def compared_said(found: Projection) -> str:
    """How many jobs are where they were projected to be; empty without a comparison."""
    if not found.compared:
        return ""
    inside = sum(one.inside for one in found.compared)
    return (
        f"{inside} of {len(found.compared)} jobs are within the projected interval; costs of"
        f" recovery from {found.compared[0].costs_from}, none from the arms that are compared;"
        " from the first step to the last, spares not counted"
    )


def spares_said(found: Projection) -> list[str]:
    """The spares that the availability asked for takes, a line for each size."""
    wanted = found.setting.availability
    return [
        f"{one.gpus:,} GPUs: spare nodes that keep all {one.nodes:,} nodes there {wanted:.12g} of"
        f" the time: {'more than a million' if one.spares is None else f'{one.spares:,}'}"
        f" ({one.load:.3g} in repair on average)"
        for one in found.spares
    ]


def at(found: Projection, gpus: int) -> list[Projected]:
    """The rows of a size."""
    return [row for row in found.rows if row.gpus == gpus]


def _changes(found: Projection) -> list[str]:
    """Break-even points of each pair, and a strategy that is ahead everywhere."""
    said = [
        f"{named(found, one.above)} overtakes {named(found, one.below)} at about {one.gpus:,} GPUs"
        f"{_sure(one)}, {_how(one)}."
        for one in found.break_even
    ]
    sizes = sorted({row.gpus for row in found.rows} | {point.gpus for point in found.curve})
    first = _first(found)
    if first:
        between = f"from {sizes[0]:,} to {sizes[-1]:,} GPUs" if len(sizes) > 1 else "there"
        doubts = [
            _doubted(found, row, other)
            for row in found.rows
            for other in _comparable(found, row.gpus)
            if row.strategy == first != other.strategy
        ]
        said.append(
            f"{named(found, first)} is ahead of the others {between}{max(doubts, default='')}."
        )
    return said


def _sure(one: BreakEven) -> str:
    """Its interval; "" if nothing that is known of it has one."""
    if one.least == one.gpus == one.most:
        return ""
    if one.least is None and one.most is None:
        return " (95 %: at any size)"
    if one.least is None:
        return f" (95 %: up to {one.most:,})"
    return f" (95 %: {one.least:,} {'or more' if one.most is None else f'to {one.most:,}'})"


def _how(one: BreakEven) -> str:
    if one.by == "formula":
        return "by the formulas" if _sure(one) else "by the formulas and costs as they are"
    return f"on the line between {one.low:,} and {one.high:,}"


def _first(found: Projection) -> str | None:
    """The strategy that is ahead at all sizes, by more than chance of simulations, and is never
    overtaken nor overtakes; None: there is none.
    """
    here = {name for one in found.break_even for name in (one.below, one.above)}
    names = [name for name in found.costs if named(found, name) == name]  # measured and published
    points = [*(row.point for row in found.rows), *found.curve]
    known = {(point.gpus, point.strategy): point for point in points if point.strategy in names}
    for name in names if len(names) > 1 else []:
        others = [(gpus, other) for gpus, other in known if other != name]
        if name not in here and all(
            (gpus, name) in known and known[gpus, name].ahead_of(known[gpus, other]) > 0
            for gpus, other in others
        ):
            return name
    return None


def _seconds(found: Projection) -> list[str]:
    """What a second of detection costs at the largest size; the table has all."""
    largest = max(found.setting.gpus)
    each = ", ".join(
        f"{row.second_gpu_hours:,.{0 if row.second_gpu_hours > 100 else 2}f} with {row.strategy}"
        f" ({row.failures:,.0f} failures)"
        for row in at(found, largest)
    )
    return [
        f"Each second until a failure is detected costs, in GPU-hours in {found.setting.days:g}"
        f" days at {largest:,} GPUs: {each}."
    ]


MOST_CAUSES = 5


def _causes(found: Projection) -> list[str]:
    """Failures of the most frequent causes in a day of running, at the largest size."""
    shares = sorted(found.setting.causes.items(), key=lambda one: -one[1])
    if not shares:
        return []
    row = max(found.rows, key=lambda one: one.gpus)
    daily = 86_400.0 / row.mtbf_s
    said = ", ".join(f"{daily * share:.3g} {name}" for name, share in shares[:MOST_CAUSES])
    more = len(shares) - MOST_CAUSES
    rest = f", and of {more} other causes" if more > 0 else ""
    return [
        f"Failures in a day of running at {row.gpus:,} GPUs: {daily:.3g}, of them {said}{rest}."
    ]


def _apart(found: Projection) -> Sequence[str]:
    """Rows whose engines differ by more than chance."""
    return [
        f"Formula ({row.closed:.4f}) and simulation ({row.goodput:.4f}) of {row.strategy} at"
        f" {row.gpus:,} GPUs differ by {row.apart:.1f} standard errors: the formula's assumptions"
        " do not hold there; take the simulation."
        for row in found.rows
        if row.differs
    ]


def compared_figures(one: Compared) -> tuple[str, ...]:
    """A compared job as a row: ranks, strategy, projected with its interval, measured, its arms and
    interval, and the residual.
    """
    low, high = one.measured_low, one.measured_high
    measured = "–" if low is None else " to ".join(enclosing(low, high, decimals=4))
    return (
        f"{one.ranks}",
        one.strategy,
        f"{one.projected:.4f}",
        " to ".join(enclosing(one.low, one.high, decimals=4)),
        f"{one.mean:.4f}",
        f"{len(one.measured)}",
        measured,
        f"{one.residual:+.4f}",
    )
