"""Reads from lines how a script counts epochs and the steps of an epoch, so that both give the step
of the run.

Scripts count each from 0 or from 1, and not all of them print how many steps an epoch has.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from trainchaos.chaos.scenario.frameworks import Framework
from trainchaos.chaos.scenario.progress import RegexProgress
from trainchaos.harness.script.listen.derive import usual_gap
from trainchaos.harness.script.listen.numbers import whole
from trainchaos.harness.script.listen.rules import Forms, plain

_MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class Counting:
    """``numbers``: key of ``workload.progress`` -> the number that an expression needs there;
    ``epoch_steps``: of an epoch, None if that is not known; ``doubt``: why its steps may not be
    those of the run.
    """

    numbers: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    epoch_steps: int | None = None
    doubt: str = ""


def counting(
    texts: Iterable[str], progress: RegexProgress, *, row: Framework | None, whole_log: bool
) -> Counting:
    """How lines count, by an expression with a group ``epoch``. ``row``: of the framework that
    prints them; ``whole_log``: no line in front of these is missing.
    """
    epochs, stated = _read(texts, progress)
    if not epochs:
        return Counting(epoch_steps=stated)
    # the last one may go on
    complete = list(epochs.values())[: max(1, len(epochs) - 1)]
    high = statistics.mode(max(steps) for steps in complete)
    low = min(min(steps) for steps in complete)
    # what goes on to its total counts from 1: 0 is drawn before the first step
    bars = row is not None and row.bars
    from_0 = low == 0 and high != stated and len(epochs) > 1 and not bars
    if row is not None and row.steps_from is not None:
        from_0 = row.steps_from == 0
    first, known = _first(epochs, whole_log)
    if row is not None and row.epochs_from is not None:
        first, known = row.epochs_from, True
    doubt = "" if known else f"the first epoch seen is {first}: correct epochs_from"
    numbers = {"epochs_from": min(first, 1), "steps_from": 0 if from_0 else 1}
    of = stated
    if stated is None and bars:
        # the last frame of each is drawn: what reads them learns how many steps an epoch has
        return Counting(numbers=numbers, epoch_steps=high if len(epochs) > 1 else None, doubt=doubt)
    if stated is None:
        stride = usual_gap(*complete)
        of = high + stride if from_0 else high
        several = len({max(steps) for steps in complete}) > 1
        if stride > 1 or several or len(epochs) < 2:
            doubt = doubt or (
                f"no line says how many steps an epoch has, and epoch_steps: {of} is a guess:"
                " correct it"
            )
        numbers["epoch_steps"] = of
    return Counting(numbers=numbers, epoch_steps=of, doubt=doubt)


def _read(texts: Iterable[str], progress: RegexProgress) -> tuple[dict[int, list[int]], int | None]:
    """Epoch -> its steps, in the order of the lines, and the steps that most lines state."""
    forms = Forms(progress)
    epochs: dict[int, list[int]] = {}
    totals: Counter[int] = Counter()
    for match in filter(None, (forms.step_in(plain(text)) for text in texts)):
        groups = match.groupdict()
        epoch, step = whole(groups.get("epoch"), _MOST), whole(groups.get("step"), _MOST)
        if epoch is not None and step is not None:
            epochs.setdefault(epoch, []).append(step)
        if "epoch" in groups and (of := whole(groups.get("of"), _MOST)) is not None:
            totals[of] += 1
    return epochs, totals.most_common(1)[0][0] if totals else None


def _first(epochs: dict[int, list[int]], whole_log: bool) -> tuple[int, bool]:
    """The first epoch, and whether it is certainly that of the run."""
    first = next(iter(epochs))
    return first, first == 0 or (first == 1 and whole_log)
