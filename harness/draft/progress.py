"""Proposes how a command's progress is read, and tests the proposal on the lines that were seen.

The beacon, if the command reported by it; else the preset or the derived expression that finds most
in the lines, tested as ``chaos try-progress`` does. Where the output does not show the steps, lines
of a file that the command writes are tried in its place.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from trainchaos.chaos.scenario.frameworks import FRAMEWORKS, Framework
from trainchaos.chaos.scenario.progress import (
    PRESETS,
    PresetProgress,
    Progress,
    RegexProgress,
    expressions,
)
from trainchaos.harness.draft.files import is_text
from trainchaos.harness.draft.watch import Sighting
from trainchaos.harness.script.listen.derive import Derived, derive, usual_gap
from trainchaos.harness.script.listen.numbers import whole
from trainchaos.harness.script.listen.progress import RegexReader
from trainchaos.harness.script.listen.rules import Forms, plain
from trainchaos.harness.script.listen.trial import try_lines

MOST_LINES = 2000
"""Newest lines that expressions are tried on."""
LEAST_STEPS = 2
UNKNOWN = 10**9
"""Steps of a command whose number of steps is not known yet."""
MOST_FILES = 64
MOST_LOOKED = 1 << 16  # bytes in which steps are looked for, of each file and each second
MOST_TEXT = 1 << 18  # bytes read of the one that has most
NS = 1e9
_MOST = 10**9
_OF_A_START = re.compile(r"\d[\d_:.T-]*\d{2}(?!\d)|(?<=version_)\d+")
"""A date, a time, a process, or a count of runs."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """How progress is read. ``progress``: None if no step was seen; ``steps``: (seconds since the
    start, step) of those seen; ``losses``: how many were read; ``total``: the number of steps that
    the lines state, or ``per_epoch`` that of an epoch; ``doubt``: why the steps may not be those of
    the run; ``ranks``: that report; ``one_epoch``: an epoch is named beside the steps, and only one
    was seen, so that they may begin again in the next.
    """

    progress: Progress | None = None
    steps: Sequence[tuple[float, int]] = ()
    losses: int = 0
    total: int | None = None
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
    def stride(self) -> int:
        """Steps from one report to the next, as is usual."""
        return statistics.multimode(
            b - a for (_, a), (_, b) in self._pairs() or [((0, 0), (0, 1))]
        )[0]

    @property
    def step_s(self) -> float | None:
        """Usual seconds a step, None if too few were seen."""
        pairs = self._pairs()
        if not pairs:
            return None
        usual = statistics.median((b[0] - a[0]) / (b[1] - a[1]) for a, b in pairs)
        first, last = pairs[0][0], pairs[-1][1]
        # lines that come in bursts have no time between them: the mean is nearer then
        return max(usual, (last[0] - first[0]) / (last[1] - first[1]))

    @property
    def longest_s(self) -> float:
        """Longest time from one report to the next."""
        return max((b[0] - a[0] for a, b in self._pairs()), default=0.0)

    def _pairs(self) -> list[tuple[tuple[float, int], tuple[float, int]]]:
        """Each step and the next, with the seconds at which each was first reported."""
        first = {step: seconds for seconds, step in reversed(self.steps)}
        return list(pairwise((first[step], step) for step in sorted(first)))


def propose(seen: Sighting, frameworks: Sequence[Framework], *, steps: int | None) -> Proposal:
    """The best way to read the progress of what was seen. ``steps``: those of the run, if they are
    known.
    """
    if seen.reports:
        return _of_beacon(seen)
    lines = list(seen.lines)[-MOST_LINES:]
    candidates = _candidates(lines, frameworks, steps, whole_log=seen.count <= len(lines))

    def rated(one: Proposal) -> tuple[bool, bool, int]:
        """Steps without a doubt are better than many of them, and losses are worth most after
        that. Of two that find the same the first one stays: a preset of the framework that was
        recognised.
        """
        done = len({step for _, step in one.steps if step})  # without the 0 that a bar begins with
        return not one.doubt, one.losses >= LEAST_STEPS, done

    fit = (one for one in candidates if one.distinct >= LEAST_STEPS)
    return max(fit, key=rated, default=Proposal())


def _candidates(
    lines: Sequence[tuple[float, str]],
    frameworks: Sequence[Framework],
    steps: int | None,
    *,
    whole_log: bool,
) -> Iterator[Proposal]:
    # a bar of Lightning, which starts anew in each epoch, is also one of tqdm
    names = [*(one.preset for one in frameworks if one.preset), "lightning", *PRESETS]
    texts = [plain(line) for _, line in lines]
    for name in dict.fromkeys(names):
        forms = Forms(PRESETS[name])
        if any(forms.step_in(text) for text in texts):
            total = _bar_total(texts, PRESETS[name])
            yield _tried(lines, _preset(name), steps, total, whole_log=whole_log)
    if found := derive(texts):
        yield _tried(lines, found.progress, steps, found.total, whole_log=whole_log, derived=found)


def _tried(
    lines: Sequence[tuple[float, str]],
    progress: RegexProgress | PresetProgress,
    steps: int | None,
    total: int | None,
    *,
    whole_log: bool,
    derived: Derived | None = None,
) -> Proposal:
    """What an expression finds. ``total``: that the lines state; ``derived``: of the lines."""
    found, doubt, per_epoch = expressions(progress), "", None
    epochs = Forms(found).epochs
    if derived and derived.epochs:
        total = None
        if not derived.counted:
            doubt = "the step begins again in each epoch, and no epoch is beside it"
    if epochs:
        name = progress.preset if isinstance(progress, PresetProgress) else None
        row = next((one for one in FRAMEWORKS if name and one.preset == name), None)
        numbers, per_epoch, unsure = counting(lines, found, row=row, whole_log=whole_log)
        doubt = doubt or unsure
        if name is None:
            progress = progress.model_copy(update=numbers)
        else:
            said = {key: n for key, n in numbers.items() if getattr(found, key) != n}
            progress = _preset(name, **said)
    known = total or steps or UNKNOWN  # a bar is the judge of its total
    trial = try_lines((line for _, line in lines), progress, known)
    if not trial.steps:
        return Proposal()
    return Proposal(
        progress=progress,
        steps=[(lines[at][0], step) for at, step in zip(trial.at, trial.steps, strict=True)],
        losses=len(trial.losses),
        total=None if epochs else total,
        doubt=doubt or "; ".join(trial.wrong),
        per_epoch=per_epoch,
        one_epoch=derived is not None and derived.one_epoch,
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


def counting(
    lines: Sequence[tuple[float, str]],
    progress: RegexProgress,
    *,
    row: Framework | None,
    whole_log: bool,
) -> tuple[dict[str, int], int | None, str]:
    """How lines count, by an expression with a group ``epoch``: scripts count epochs, and steps of
    one, from 0 or from 1, and not all print how many steps an epoch has. ``row``: of the framework
    that prints them; ``whole_log``: no line in front of these is missing.

    Returns key of ``workload.progress`` -> the number that the expression needs there; the steps of
    an epoch, None if they are not known; and why its steps may not be those of the run.
    """
    epochs, stated = _read(lines, progress)
    if not epochs:
        return {}, stated, ""
    # the last one may go on
    complete = list(epochs.values())[: max(1, len(epochs) - 1)]
    high = statistics.mode(max(steps) for steps in complete)
    low = min(min(steps) for steps in complete)
    # what goes on to its total counts from 1: 0 is drawn before the first step
    bars = row is not None and row.bars
    from_0 = low == 0 and high != stated and len(epochs) > 1 and not bars
    if row is not None and row.steps_from is not None:
        from_0 = row.steps_from == 0
    first = next(iter(epochs))
    known = first == 0 or (first == 1 and whole_log)
    if row is not None and row.epochs_from is not None:
        first, known = row.epochs_from, True
    doubt = "" if known else f"the first epoch seen is {first}: correct epochs_from"
    numbers = {"epochs_from": min(first, 1), "steps_from": 0 if from_0 else 1}
    if stated is not None:
        return numbers, stated, doubt
    if bars:
        # the last frame of each is drawn: what reads them learns how many steps an epoch has
        return numbers, high if len(epochs) > 1 else None, doubt
    stride = usual_gap(*complete)
    of = high + stride if from_0 else high
    if stride > 1 or len({max(steps) for steps in complete}) > 1 or len(epochs) < 2:
        guess = f"no line says how many steps an epoch has, and epoch_steps: {of} is a guess"
        doubt = doubt or f"{guess}: correct it"
    return numbers | {"epoch_steps": of}, of, doubt


def _read(
    lines: Iterable[tuple[float, str]], progress: RegexProgress
) -> tuple[dict[int, list[int]], int | None]:
    """Epoch -> its steps, in the order of the lines, and the steps that most lines state."""
    forms = Forms(progress)
    epochs: dict[int, list[int]] = {}
    totals: Counter[int] = Counter()
    for match in filter(None, (forms.step_in(plain(text)) for _, text in lines)):
        groups = match.groupdict()
        epoch, step = whole(groups.get("epoch"), _MOST), whole(groups.get("step"), _MOST)
        if epoch is not None and step is not None:
            epochs.setdefault(epoch, []).append(step)
        if "epoch" in groups and (of := whole(groups.get("of"), _MOST)) is not None:
            totals[of] += 1
    return epochs, totals.most_common(1)[0][0] if totals else None


# ---- a file in place of the output


def log_of_steps(paths: Iterable[Path]) -> Path | None:
    """Of these files the one whose lines show most steps; None if none does."""
    steps = {path: _steps_in(path) for path in sorted(paths)[:MOST_FILES] if is_text(path)}
    most = max(steps, key=lambda path: steps[path], default=None)
    return most if most is not None and steps[most] >= LEAST_STEPS else None


def _steps_in(path: Path) -> int:
    """How many steps its lines show, as far as the word beside them says that they are steps."""
    try:
        with open(path, "rb") as stream:
            text = stream.read(MOST_LOOKED).decode(errors="replace")
    except OSError:
        return 0
    seen = derive(text.splitlines())
    return seen.steps if seen is not None and seen.sure else 0


def named(path: Path, seen: Sighting, directory: Path) -> str:
    """A file as a scenario names it: numbers that are others in each start are left open."""
    name, front = str(path), ""
    if seen.scratch is not None and path.is_relative_to(seen.scratch):
        name, front = str(path.relative_to(seen.scratch)), "$CHAOS_SCRATCH/"
    elif path.is_relative_to(directory):
        name = str(path.relative_to(directory))
    return front + (name if path in seen.before else _OF_A_START.sub("*", name))


def as_printed(path: Path, seen: Sighting) -> Sighting:
    """What was seen, as if the lines of a file had been printed in place of the output."""
    with open(path, "rb") as stream:
        start = seen.before.get(path, (0, 0))[1]
        start = stream.seek(start if start < path.stat().st_size else 0)
        rows = stream.read(MOST_TEXT).decode(errors="replace").splitlines(keepends=True)
    writes = seen.files[path].writes if path in seen.files else []
    lines: deque[tuple[float, str]] = deque(maxlen=seen.lines.maxlen)
    for row in rows:
        start += len(row.encode())
        lines.append((next((at for at, size in writes if size >= start), seen.seconds), row))
    return replace(seen, lines=lines, count=len(rows))
