"""Losses that a command reported for surviving steps, and whether it ended on non-finite ones."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from trainchaos.chaos.events.log import Event
from trainchaos.harness.judge.record.history import History

ENDED = 3
"""Norms of gradients that are no numbers, to the end, for a job to be spoilt: a scaler of losses
meets some on its way.
"""
LAST = 5
"""Last steps by which a job is judged: it is bad if most, or the very last, are not finite."""


@dataclass(frozen=True, kw_only=True)
class UnreadValues:
    """Reported values that could not be read as numbers: how many, and the first."""

    count: int
    example: str


def losses_of(history: History) -> dict[int, dict[int | None, list[float]]]:
    """Step -> rank (None: not given) -> losses that it reported, in the generation whose run of the
    step survived.
    """
    lineage = history.lineage
    found: dict[int, dict[int | None, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in history.reports:
        run = lineage.get(event.step or 0)
        if (
            event.data["loss"] is not None
            and run is not None
            and run.generation == event.generation
        ):
            found[run.step][event.data["rank"]].append(float(event.data["loss"]))
    return {step: dict(found[step]) for step in sorted(found)}


def losses_before(history: History, step: int, rank: int | None) -> list[float]:
    """Losses that a rank reported for a step in generations before the one whose run survived."""
    run = history.lineage.get(step)
    return [
        float(event.data["loss"])
        for event in history.reports
        if run is not None
        and (event.step, event.data["rank"]) == (step, rank)
        and event.generation < run.generation
        and event.data["loss"] is not None
    ]


def unread_of(history: History, since: int = 0) -> Mapping[str, UnreadValues]:
    """Name (``loss``, ``rank``, ``samples``) -> values reported for it that could not be read, in
    reports of step ``since`` and later ones.
    """
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for event in history.reports:
        if (event.step or 0) < since:
            continue
        for name, text in (event.data.get("unread") or {}).items():
            counts[name] += 1
            first.setdefault(name, str(text))
    return {name: UnreadValues(count=count, example=first[name]) for name, count in counts.items()}


def spoilt_since(history: History) -> int | None:
    """The step from which the job reported non-finite losses to its end; None: it ended on finite
    losses, or reported none.
    """
    losses = losses_of(history)
    bad = [step for step, by_rank in losses.items() if _is_bad(by_rank)]
    last = list(losses)[-LAST:]
    if not bad or (last[-1] not in bad and 2 * len(set(bad) & set(last)) <= len(last)):
        return None
    good = [step for step in losses if step not in set(bad)]
    return min(
        (step for step in bad if step > max((g for g in good if g < bad[-1]), default=0)),
        default=bad[-1],
    )


def gradients_spoilt_since(history: History) -> int | None:
    """The step from which on, to the end, the reported norms of gradients are no numbers, ENDED of
    them at least; None: not so. How far apart they are shows which reports tell of gradients: those
    of a bar need not.
    """
    reports = history.reports
    bad = sorted({event.step or 0 for event in reports if event.data.get("spoilt")})
    apart = [after - before for before, after in itertools.pairwise(bad)]
    last = max((event.step or 0 for event in reports), default=0)
    if len(bad) < ENDED or last - bad[-1] > median(apart):
        return None
    gaps = [place for place, gap in enumerate(apart, start=1) if gap > median(apart)]
    return bad[max(gaps, default=0)]


def is_bad(event: Event) -> bool:
    """Whether a report's loss is not finite."""
    return event.data["loss"] is not None and not math.isfinite(float(event.data["loss"]))


def _is_bad(by_rank: Mapping[int | None, list[float]]) -> bool:
    return any(not math.isfinite(loss) for losses in by_rank.values() for loss in losses)
