"""Proposes how a command's progress is read, and tests the proposal on the lines that were seen.

The beacon, if the command reported by it; else the preset or the derived expression that finds most
in the lines, tested as ``chaos try-progress`` does.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

from trainchaos.chaos.scenario.frameworks import FRAMEWORKS, Framework
from trainchaos.chaos.scenario.progress import (
    PRESETS,
    PresetProgress,
    Progress,
    RegexProgress,
    expressions,
)
from trainchaos.harness.draft.watching.watch import Sighting
from trainchaos.harness.script.listen.derive import Derived, derive, usual_gap
from trainchaos.harness.script.listen.numbers import whole
from trainchaos.harness.script.listen.progress import RegexReader
from trainchaos.harness.script.listen.rules import Forms, plain
from trainchaos.harness.script.listen.trial import Trial, try_lines

MOST_LINES = 2000
"""Newest lines that expressions are tried on."""
LEAST_STEPS = 2
UNKNOWN = 10**9
"""Steps of a command whose number of steps is not known yet."""
NS = 1e9
_MOST = 10**9


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """How progress is read. ``progress``: None if no step was seen; ``steps``: (seconds since the
    start, step) of those seen; ``losses``: how many were read; ``total``: the number of steps that
    the lines state, or ``per_epoch`` that of an epoch; ``trial``: of the lines, None for the
    beacon; ``doubt``: why the steps may not be those of the run; ``ranks``: that report;
    ``one_epoch``: an epoch is named beside the steps, and only one was seen, so that they may begin
    again in the next.
    """

    progress: Progress | None = None
    steps: Sequence[tuple[float, int]] = ()
    losses: int = 0
    total: int | None = None
    trial: Trial | None = None
    doubt: str = ""
    per_epoch: int | None = None
    ranks: frozenset[int] = field(default_factory=frozenset)
    one_epoch: bool = False

    @property
    def first_s(self) -> float | None:
        """Seconds to the first step seen."""
        return self.steps[0][0] if self.steps else None

    @property
    def distinct(self) -> int:
        """Number of different steps seen."""
        return len({step for _, step in self.steps})

    @property
    def done(self) -> int:
        """As ``distinct``, without the 0 that a bar begins with."""
        return len({step for _, step in self.steps if step})

    @property
    def stride(self) -> int:
        """Steps from one report to the next, as is usual."""
        return self._gaps()[0]

    @property
    def step_s(self) -> float | None:
        """Usual seconds a step, None if too few were seen."""
        return self._gaps()[1]

    @property
    def longest_s(self) -> float:
        """Longest time from one report to the next."""
        return self._gaps()[2]

    def _gaps(self) -> tuple[int, float | None, float]:
        first = dict[int, float]()
        for seconds, step in self.steps:
            first.setdefault(step, seconds)
        rows = sorted(first.items())
        pairs = list(pairwise(rows))
        if not pairs:
            return 1, None, 0.0
        strides = [after[0] - before[0] for before, after in pairs]
        stride = statistics.multimode(strides)[0]
        usual = statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs)
        mean = (rows[-1][1] - rows[0][1]) / (rows[-1][0] - rows[0][0])
        # lines that come in bursts have no time between them: the mean is nearer then
        return stride, max(usual, mean), max(b[1] - a[1] for a, b in pairs)


def propose(seen: Sighting, frameworks: Sequence[Framework], *, steps: int | None) -> Proposal:
    """The best way to read the progress of what was seen. ``steps``: those of the run, if they are
    known.
    """
    if seen.reports:
        return _of_beacon(seen)
    lines = list(seen.lines)[-MOST_LINES:]
    best = Proposal()
    whole_log = seen.count <= len(lines)
    for one in _candidates(lines, frameworks, steps, whole_log):
        if one.distinct < LEAST_STEPS:
            continue
        if _rated(one) > _rated(best):
            best = one
    return best


def _rated(one: Proposal) -> tuple[bool, bool, bool, int]:
    """Steps without a doubt are better than many of them, and losses are worth most after that.
    Of two that find the same the first one stays: a preset of the framework that was recognised.
    """
    return one.progress is not None, not one.doubt, one.losses >= LEAST_STEPS, one.done


def _candidates(
    lines: Sequence[tuple[float, str]],
    frameworks: Sequence[Framework],
    steps: int | None,
    whole_log: bool,
) -> Iterator[Proposal]:
    names = [one.preset for one in frameworks if one.preset]
    # a bar of Lightning, which starts anew in each epoch, is also one of tqdm
    texts = [plain(line) for _, line in lines]
    for name in dict.fromkeys([*names, "lightning", *PRESETS]):
        forms = Forms(PRESETS[name])
        if not any(forms.step_in(text) for text in texts):
            continue
        preset = _preset(name)
        total = _bar_total(texts, PRESETS[name])
        yield _tried(lines, preset, steps, total, whole_log=whole_log)
    found = derive(line for _, line in lines)
    if found is not None:
        yield _of_derived(lines, found, steps, whole_log)


def _of_derived(
    lines: Sequence[tuple[float, str]],
    found: Derived,
    steps: int | None,
    whole_log: bool,
) -> Proposal:
    progress, doubt = found.progress, ""
    if found.epochs and not found.counted:
        doubt = "the step begins again in each epoch, and no epoch is beside it"
    total = None if found.epochs else found.total
    one = _tried(lines, progress, steps, total, doubt, whole_log=whole_log, stated=found.runs)
    return replace(one, one_epoch=found.one_epoch)


def _tried(
    lines: Sequence[tuple[float, str]],
    progress: RegexProgress | PresetProgress,
    steps: int | None,
    total: int | None,
    doubt: str = "",
    *,
    whole_log: bool,
    stated: bool = False,
) -> Proposal:
    found = expressions(progress)
    per_epoch = None
    epochs = Forms(found).epochs
    if epochs:
        name = progress.preset if isinstance(progress, PresetProgress) else None
        row = next((one for one in FRAMEWORKS if name and one.preset == name), None)
        counted = counting((line for _, line in lines), found, row=row, whole_log=whole_log)
        per_epoch, doubt = counted.epoch_steps, doubt or counted.doubt
        if name is None:
            progress = progress.model_copy(update=dict(counted.numbers))
        else:
            said = {key: n for key, n in counted.numbers.items() if getattr(found, key) != n}
            progress = _preset(name, **said)
    known = total or steps or UNKNOWN  # a bar is the judge of its total
    trial = try_lines((line for _, line in lines), progress, known, stated=stated)
    if not trial.steps:
        return Proposal()
    return Proposal(
        progress=progress,
        steps=[(lines[at][0], step) for at, step in zip(trial.at, trial.steps, strict=True)],
        losses=len(trial.losses),
        total=None if epochs else total,
        trial=trial,
        doubt=doubt or "; ".join(trial.wrong),
        per_epoch=per_epoch,
    )


def _preset(name: str, **numbers: int) -> PresetProgress:
    return PresetProgress.model_validate({"preset": name, **numbers})


def _bar_total(texts: Sequence[str], progress: RegexProgress) -> int | None:
    """The total of the bar that moved most, of several totals that lines state."""
    totals: Counter[int] = Counter()
    reader = RegexReader(None, progress, 0)
    for text in texts:
        reader.other_total = None
        reader.parse(text)
        if reader.other_total is not None:
            totals[reader.other_total] += 1
    return max(totals, key=lambda total: (totals[total], total)) if totals else None


def _of_beacon(seen: Sighting) -> Proposal:
    reports = list(seen.reports)
    # a report has the clock of its process, which on one machine is the harness's: monotonic
    start_ns = (reports[0].time_ns or 0) - int((seen.first_report_s or 0.0) * NS)
    return Proposal(
        progress="beacon",
        steps=[(((one.time_ns or 0) - start_ns) / NS, one.step) for one in reports],
        losses=sum(1 for one in reports if one.loss is not None),
        ranks=frozenset(one.rank for one in reports if one.rank is not None),
    )


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
    """How lines count, by an expression with a group ``epoch``: scripts count epochs, and steps of
    one, from 0 or from 1, and not all print how many steps an epoch has. ``row``: of the framework
    that prints them; ``whole_log``: no line in front of these is missing.
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
