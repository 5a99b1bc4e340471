"""What the sweep of ``adaptive`` says: tables of goodput by mix and costs, paired by seed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from trainchaos.chaos.stats import median_ci95

ADAPTIVE = "adaptive"
FIXED = ("hot-spare", "drop-replica", "checkpoint-restart")
STRATEGIES = (*FIXED, ADAPTIVE)
MOST_BEHIND = 0.05

Values = Mapping[tuple[str, str], Mapping[str, Sequence[float]]]
"""(mix, costs) -> strategy -> goodput, in the order of the seeds."""


def gathered(lines: Iterable[Mapping[str, object]]) -> Values:
    """The values of a saved sweep, by mix and costs."""
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for line in sorted(lines, key=lambda line: int(str(line["seed"]))):
        cell = found.setdefault((str(line["mix"]), str(line["costs"])), {})
        goodput = line["goodput"]
        assert isinstance(goodput, dict)
        for strategy, value in goodput.items():
            cell.setdefault(strategy, []).append(float(value))
    return found


def behind(values: Mapping[str, Sequence[float]]) -> tuple[str, list[float]]:
    """The fixed strategy of the best median, and by how much of it adaptive is better with each
    seed (negative: worse).
    """
    best = max(FIXED, key=lambda name: median(values[name]))
    pairs = zip(values[ADAPTIVE], values[best], strict=True)
    return best, [(own - other) / other if other else 0.0 for own, other in pairs]


def table(values: Values) -> str:
    """Goodput by mix and costs: median of each, and adaptive against the best fixed strategy."""
    head = ["mix", "costs", "n", *STRATEGIES, "best fixed", "adaptive against it, median (95 % CI)"]
    rows = [head, ["---"] * len(head)]
    for (mix, costs), cell in values.items():
        best, ratios = behind(cell)
        medians = [with_interval(cell[name]) for name in STRATEGIES]
        against = _percent(ratios)
        rows.append([mix, costs, str(len(ratios)), *medians, best, against])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def overall(values: Values) -> str:
    """Over all mixes and costs: mean goodput, how often each is the best, and paired differences
    of adaptive to each.
    """
    head = ["strategy", "n", "mean goodput", "worst cell", "adaptive - it, median (95 % CI)"]
    rows = [head, ["---"] * len(head)]
    for name in STRATEGIES:
        every = [value for cell in values.values() for value in cell[name]]
        worst = min(median(cell[name]) for cell in values.values())
        pairs = [
            own - other
            for cell in values.values()
            for own, other in zip(cell[ADAPTIVE], cell[name], strict=True)
        ]
        differs = "" if name == ADAPTIVE else _points(pairs)
        mean = sum(every) / len(every)
        rows.append([name, str(len(every)), f"{mean:.3f}", f"{worst:.3f}", differs])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def too_far_behind(values: Values) -> Iterator[str]:
    """Cells where adaptive's median is more than ``MOST_BEHIND`` below the best fixed strategy's,
    and fixed strategies that are better overall.
    """
    for (mix, costs), cell in values.items():
        best, ratios = behind(cell)
        if median(ratios) < -MOST_BEHIND:
            yield f"{mix}, {costs}: {-median(ratios):.1%} behind {best}"
    means = {
        name: sum(sum(cell[name]) / len(cell[name]) for cell in values.values())
        for name in STRATEGIES
    }
    for name in FIXED:
        if means[name] >= means[ADAPTIVE]:
            yield f"{name} is better overall"


def with_interval(values: Sequence[float]) -> str:
    """The median, and its 95 % interval where there are values enough."""
    interval = median_ci95(values)
    text = f"{median(values):.3f}"
    return f"{text} ({interval[0]:.3f}-{interval[1]:.3f})" if interval else text


def _percent(values: Sequence[float]) -> str:
    interval = median_ci95(values)
    text = f"{median(values):+.1%}"
    return f"{text} ({interval[0]:+.1%} to {interval[1]:+.1%})" if interval else text


def _points(values: Sequence[float]) -> str:
    interval = median_ci95(values)
    text = f"{median(values):+.3f}"
    return f"{text} ({interval[0]:+.3f} to {interval[1]:+.3f})" if interval else text
