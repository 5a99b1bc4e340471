"""Facts of a comparison, independent of format: which stacks kept the job's work, which were
faster, and the costs.
"""

from __future__ import annotations

import math
import statistics
from functools import cached_property

from trainchaos.chaos.units import counted
from trainchaos.harness.compare.result.model import (
    OUTCOMES,
    CellSummary,
    Comparison,
    Ratio,
    StackInfo,
    Trial,
)
from trainchaos.harness.judge.figures import Metric


class ComparisonFacts:
    """Lookups and ranks of a comparison. ``labels``: of the stacks that ran, first those that kept
    most, then the fastest; ``counted``: families that test the stacks, used for findings and ranks;
    ``apart``: families that test a training script's checks.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.families = list(comparison.families)
        stacks_alone = [name for name in self.families if name not in comparison.script]
        self.counted = stacks_alone or self.families
        self.apart = [name for name in self.families if name not in self.counted]
        self._cells = {(cell.label, cell.family): cell for cell in comparison.cells}
        self._ratios: dict[tuple[str, str, str], Ratio] = {
            (r.label, r.family, r.metric): r for r in comparison.ratios
        }

    @cached_property
    def labels(self) -> list[str]:
        """Labels with at least one cell, in order of rank."""
        ran = [
            stack.label
            for stack in self.comparison.stacks
            if any(key[0] == stack.label for key in self._cells)
        ]
        return sorted(ran, key=lambda label: (-self.kept(label), self._usual(label)))

    @cached_property
    def stacks(self) -> dict[str, StackInfo]:
        """Label -> stack."""
        return {stack.label: stack for stack in self.comparison.stacks}

    @property
    def reference(self) -> str:
        """The label that the others are compared with."""
        return self.comparison.reference

    @cached_property
    def others(self) -> list[str]:
        """Labels not of the reference's kind: if it is ours, those of others. Without ``none``,
        which recovers from nothing and only shows the bare step time.
        """
        ours = self.stacks[self.reference].ours if self.reference in self.stacks else False
        known = [(label, self.stacks[label]) for label in self.labels if label != self.reference]
        return [
            label for label, stack in known if stack.stack != "none" and not (ours and stack.ours)
        ]

    def against(self, label: str) -> str:
        """The label that one is compared with: a built-in that continues in the same way, else the
        reference.
        """
        known = self.stacks.get(label)
        return (known.against if known is not None else "") or self.reference

    def cell(self, label: str, family: str) -> CellSummary | None:
        """The summary of a stack under a family; None: it did not run."""
        return self._cells.get((label, family))

    def ratio(self, label: str, family: str, metric: str = "recovery") -> Ratio | None:
        """The paired ratio against the stack it is compared with."""
        found = self._ratios.get((label, family, metric))
        return found if found is not None and found.against == self.against(label) else None

    def trials(self, label: str, family: str) -> list[Trial]:
        """The trials of a stack under a family, by seed."""
        found = (t for t in self.comparison.trials if (t.label, t.family) == (label, family))
        return sorted(found, key=lambda trial: trial.seed)

    def kept(self, label: str) -> int:
        """Number of counted families in which every trial kept the job's work."""
        found = (self.cell(label, family) for family in self.counted)
        return sum(cell is not None and OUTCOMES[cell.worst].kept for cell in found)

    def tried(self, label: str) -> int:
        """Number of counted families in which the stack was tested."""
        found = (self.cell(label, family) for family in self.counted)
        return sum(cell is not None and OUTCOMES[cell.worst].tried for cell in found)

    def recovery(self, label: str, family: str) -> float | None:
        """Median recovery time in seconds; infinite if it does not recover, None if there is
        nothing to recover from.
        """
        cell = self.cell(label, family)
        return cell.recovery.median if cell is not None and cell.recovery is not None else None

    def overhead(self, label: str) -> float | None:
        """Fault-free step over the bare one: the largest of the medians of the families."""
        found = self.slowest_step(label)
        return None if found is None else found.median

    def slowest_step(self, label: str) -> Metric | None:
        """The overhead of the family whose median is the largest."""
        found = [c.overhead for f in self.families if (c := self.cell(label, f)) and c.overhead]
        return max(found, key=lambda metric: metric.median or 0.0, default=None)

    def fastest_other(self, family: str) -> tuple[str, float] | None:
        """The other stack, compared with the reference, that kept the work with the smallest finite
        median recovery, and that median.
        """
        found = []
        for label in (label for label in self.others if self.against(label) == self.reference):
            cell, value = self.cell(label, family), self.recovery(label, family)
            if (
                cell is not None
                and OUTCOMES[cell.worst].kept
                and value is not None
                and math.isfinite(value)
            ):
                found.append((value, label))
        return (min(found)[1], min(found)[0]) if found else None

    def money(self, hours: float | None) -> float | None:
        """Cost of GPU hours at the given price."""
        price = self.comparison.price
        return None if hours is None or price is None else hours * price

    def mean_wall(self, label: str, family: str) -> dict[str, float]:
        """Mean seconds of each class of the faulted arms, ``useful`` first; empty without
        trials.
        """
        trials = [trial for trial in self.trials(label, family) if trial.outcome != "refuted"]
        if not trials:
            return {}
        names = list(dict.fromkeys(name for trial in trials for name in trial.badput))
        lost = {
            name.replace("_", " "): statistics.fmean(t.badput.get(name, 0.0) for t in trials)
            for name in names
        }
        useful = statistics.fmean(t.wall - sum(t.badput.values()) for t in trials)
        return {"useful": max(useful, 0.0)} | {k: v for k, v in lost.items() if v > 0}

    def phased(self, label: str, family: str) -> str:
        """Number of trials with phases, of those in which the fault landed."""
        landed = [trial for trial in self.trials(label, family) if OUTCOMES[trial.outcome].tried]
        return counted(sum(bool(trial.phases) for trial in landed), len(landed))

    def typical(self, label: str, family: str) -> Trial | None:
        """The trial of (upper) median recovery time that has phases: a real one, so that they add
        up.
        """
        timed = [
            (t.recovery, t.seed, t)
            for t in self.trials(label, family)
            if t.recovery is not None and t.phases
        ]
        return sorted(timed, key=lambda item: item[:2])[len(timed) // 2][2] if timed else None

    def ahead(self, label: str, family: str) -> str:
        """How a stack does better under a family than the stack it is compared with; empty if it
        does not.
        """
        reference = self.against(label)
        mine, other = self.cell(reference, family), self.cell(label, family)
        if mine is None or other is None or label == reference or not OUTCOMES[mine.worst].tried:
            return ""
        if OUTCOMES[other.worst].kept and not OUTCOMES[mine.worst].kept:
            return f"keeps the work, {reference} does not"
        if other.worst == "masked" and mine.worst != "masked":
            return f"not stopped at all, {reference} is"
        ratio = self.ratio(label, family)
        if ratio is None or not OUTCOMES[other.worst].kept:
            return ""
        if ratio.says in ("faster", "only this one recovers"):
            return f"faster than {reference}"
        shorter = (
            ratio.says in ("too few", "no difference shown")
            and ratio.value is not None
            and ratio.value < 1
        )
        return f"shorter than {reference}, which may be chance" if shorter else ""

    def _usual(self, label: str) -> float:
        """Median over families of the median recovery time; a missing one counts as never."""
        found = [value for f in self.counted if (value := self.recovery(label, f)) is not None]
        return statistics.median(found) if found else math.inf
