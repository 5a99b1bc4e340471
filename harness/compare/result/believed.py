"""Decides whether an arm's record is credible. It is judged again whenever a comparison is read;
stored verdicts are not used. Pure.

A record that is not whole, and a failure of a checker in ``CONTRADICTS``, are no property of a
stack: the log is damaged, belongs to another arm, or contradicts itself. Its times are then
ignored, whichever side they favour. Failures of other checkers concern the job, the subject of the
comparison, and other inconclusive findings prove nothing against a record.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainchaos.chaos.events.log import Kind, Log
from trainchaos.chaos.scenario.model import Cell, ResolvedRun
from trainchaos.harness.judge.checkers import CHECKERS, Evidence, check, check_all
from trainchaos.harness.judge.evidence.expected import expected_of
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.observed import samples_of_steps
from trainchaos.harness.judge.record.whole import broken
from trainchaos.harness.judge.results import Finding, merge

CONTRADICTS = ("identity", "landing", "recovery-shown")
THREE = ("pass", "inconclusive", "fail")


@dataclass(frozen=True, kw_only=True)
class ArmRecord:
    """The log of one arm, with the plan it must match. ``arm``: kind in its run, ``faulted`` or
    ``control``; ``name`` of its scenario and ``seed`` of its run as the comparison planned them,
    empty and None without a plan.
    """

    log: Log
    resolved: ResolvedRun
    cell: Cell
    repeat: int = 0
    arm: str = "faulted"
    control: Log | None = None
    name: str = ""
    seed: int | None = None

    @cached_property
    def contradictions(self) -> list[str]:
        """Why the record is not credible; empty: no contradiction was found."""
        if lost := broken(self.log):
            return [f"the record is not whole: {why}" for why in lost.values()]
        found = ((name, check(CHECKERS[name], self._evidence)) for name in CONTRADICTS)
        failing = [
            f"{name}: {finding.witness}" for name, finding in found if finding.verdict == "fail"
        ]
        return [*self._of_another(), *failing]

    @property
    def history(self) -> History:
        """The arm put in order."""
        return self._evidence.history

    def verdict(self, stored: str) -> str:
        """The run's verdict, judged again; verdicts other than pass, inconclusive and fail are
        kept.
        """
        if stored not in THREE:
            return stored
        return max(stored, merge([f.verdict for f in self._findings.values()]), key=THREE.index)

    def said_as(self, who: str) -> list[str]:
        """Notes for trials compared with this record, which belongs to ``who``."""
        failing = (
            f"{name}: {one.witness}"
            for name, one in self._findings.items()
            if one.verdict == "fail"
        )
        return self.left_out_as(who) or [
            f"{who} fails: {first}" for first in itertools.islice(failing, 1)
        ]

    def left_out_as(self, who: str) -> list[str]:
        """Note that this record, which belongs to ``who``, is left out; empty if it is credible."""
        return [f"{who} is left out: {why}" for why in self.contradictions[:1]]

    @cached_property
    def _findings(self) -> Mapping[str, Finding]:
        return check_all(self._evidence)

    @cached_property
    def _evidence(self) -> Evidence:
        controls = () if self.control is None else (self.control,)
        return Evidence(
            arm=self.arm,
            cell=self.cell,
            log=self.log,
            control=self.control,
            controls=controls,
            expected=expected_of(self.resolved, self.cell, self.repeat, self.arm),
        )

    def _of_another(self) -> Iterator[str]:
        """Signs that the whole run belongs to another arm: its scenario came with it, and agrees
        with it.
        """
        name, seed = self.cell.scenario.name, self.resolved.seed
        if self.name and name != self.name:
            yield f"its run is one of {name}, not of {self.name}"
        if self.seed is not None and seed != self.seed:
            yield f"its run has seed {seed}, planned is {self.seed}"
        command = self.cell.scenario.workload.command
        yield from self._of_too_many_samples()
        for event in self.log.of(Kind.COMMAND_STARTED):
            if command is not None and not _same_words(event.data["argv"], command):
                yield (
                    f"its command was {' '.join(map(str, event.data['argv']))[:200]}, not that of"
                    " its scenario"
                )
                return

    def _of_too_many_samples(self) -> Iterator[str]:
        """Every stack trains the same job, whose ranks report their own share of the
        global batch.
        """
        batch, history = self.cell.scenario.workload.global_batch, self._evidence.history
        if not self.name or not history.info.observed:
            return
        for (generation, step), samples in samples_of_steps(history).items():
            if samples > batch:
                yield (
                    f"step {step} of generation {generation} had {samples} samples, the global"
                    f" batch is {batch}"
                )
                return


def _same_words(said: object, planned: Sequence[str]) -> bool:
    """Whether a command is the planned one, except for values filled in by the harness."""
    if not isinstance(said, list) or len(said) != len(planned):
        return False
    return all("$" in word or mine == word for mine, word in zip(said, planned, strict=True))
