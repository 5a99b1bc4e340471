"""Reads from lines how a script counts epochs and the steps of an epoch, so that both give the step
of the run.

Scripts count each from 0 or from 1, and not all of them print how many steps an epoch has.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainchaos.chaos.scenario.progress import RegexProgress
from trainchaos.harness.script.listen.numbers import whole
from trainchaos.harness.script.listen.progress import ESCAPES

_MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class Counting:
    """``progress``: the expression with the numbers that it needs; ``epoch_steps``: of an epoch,
    None if that is not known; ``doubt``: why its steps may not be those of the run.
    """

    progress: RegexProgress
    epoch_steps: int | None = None
    doubt: str = ""


def counting(
    texts: Iterable[str], progress: RegexProgress, *, bars: bool, whole_log: bool
) -> Counting:
    """How lines count, by an expression with a group ``epoch``. ``bars``: they are bars, drawn
    before the first step as well; ``whole_log``: no line in front of these is missing.
    """
    epochs, stated = _read(texts, progress)
    if not epochs:
        return Counting(progress=progress, epoch_steps=stated)
    # the last one may go on
    complete = list(epochs.values())[: max(1, len(epochs) - 1)]
    high = statistics.mode(max(steps) for steps in complete)
    low = min(min(steps) for steps in complete)
    # what goes on to its total counts from 1: 0 is drawn before the first step
    from_0 = low == 0 and high != stated and len(epochs) > 1 and not bars
    first, known = _first(epochs, whole_log)
    doubt = "" if known else f"the first epoch seen is {first}: correct epochs_from"
    of = stated
    if stated is None:
        stride = _stride(complete)
        of = high + stride if from_0 else high
        several = len({max(steps) for steps in complete}) > 1
        if stride > 1 or several or len(epochs) < 2:
            doubt = doubt or (
                f"no line says how many steps an epoch has, and epoch_steps: {of} is a guess:"
                " correct it"
            )
    counted = progress.model_copy(
        update={
            "epochs_from": min(first, 1),
            "steps_from": 0 if from_0 else 1,
            "epoch_steps": of if stated is None else None,
        }
    )
    return Counting(progress=counted, epoch_steps=of, doubt=doubt)


def _read(texts: Iterable[str], progress: RegexProgress) -> tuple[dict[int, list[int]], int | None]:
    """Epoch -> its steps, in the order of the lines, and the steps that most lines state."""
    pattern = re.compile(progress.regex)
    epochs: dict[int, list[int]] = {}
    totals: Counter[int] = Counter()
    for match in filter(None, (pattern.search(ESCAPES.sub("", text)) for text in texts)):
        groups = match.groupdict()
        epoch, step = whole(groups.get("epoch"), _MOST), whole(groups.get("step"), _MOST)
        if epoch is not None and step is not None:
            epochs.setdefault(epoch, []).append(step)
        if (of := whole(groups.get("of"), _MOST)) is not None:
            totals[of] += 1
    return epochs, totals.most_common(1)[0][0] if totals else None


def _first(epochs: dict[int, list[int]], whole_log: bool) -> tuple[int, bool]:
    """The first epoch, and whether it is certainly that of the run."""
    first = next(iter(epochs))
    return first, first == 0 or (first == 1 and whole_log)


def _stride(epochs: Sequence[Sequence[int]]) -> int:
    """Steps from one line to the next of an epoch, as is usual."""
    gaps = Counter(
        after - before
        for steps in epochs
        for before, after in pairwise(dict.fromkeys(steps))
        if after > before
    )
    return gaps.most_common(1)[0][0] if gaps else 1
