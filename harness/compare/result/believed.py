"""Whether the record of an arm can be what happened: judged again whenever a comparison is read,
never taken from what was stored when it was played. Pure.

What a checker of ``CONTRADICTS`` fails is no property of a stack: the log is not that of this arm,
or says what cannot be. Its times then count for nothing, in whoever's favour they are. What other
checkers fail is about the job, which is what a comparison is about, and what is inconclusive proves
nothing against a record.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from chaos.events.log import Kind, Log
from chaos.scenario.model import Cell, ResolvedRun
from harness.judge.checkers import CHECKERS, Evidence, check, check_all
from harness.judge.evidence.expected import expected_of, twins_of
from harness.judge.record.history import History
from harness.judge.record.observed import samples_of_steps
from harness.judge.results import Finding, merge

CONTRADICTS = ("identity", "landing", "happens-before", "lifecycle", "recovery-shown")
THREE = ("pass", "inconclusive", "fail")


@dataclass(frozen=True, kw_only=True)
class ArmRecord:
    """The log of one arm, and what it should be that of. ``arm``: of its run, ``faulted`` or
    ``control``; ``name``: of its scenario, ``seed``: of its run, as the comparison planned them,
    empty and None where nobody planned; ``twins``: other arms whose log has the same content.
    """

    log: Log
    resolved: ResolvedRun
    cell: Cell
    repeat: int = 0
    arm: str = "faulted"
    control: Log | None = None
    name: str = ""
    seed: int | None = None
    twins: Sequence[str] = field(default=())

    @cached_property
    def contradictions(self) -> list[str]:
        """Why it cannot be what happened; empty: nothing speaks against it."""
        found = ((name, check(CHECKERS[name], self._evidence)) for name in CONTRADICTS)
        told = [
            f"{name}: {finding.witness}" for name, finding in found if finding.verdict == "fail"
        ]
        return [*self._of_another(), *told]

    @property
    def history(self) -> History:
        """The arm put in order."""
        return self._evidence.history

    def verdict(self, stored: str) -> str:
        """That of its run, made anew; words that are more than pass, inconclusive or fail stay."""
        if stored not in THREE:
            return stored
        return max(stored, merge([f.verdict for f in self._findings.values()]), key=THREE.index)

    def said_as(self, who: str) -> list[str]:
        """What is to be said of trials that are set against this record, as that of ``who``."""
        failing = (
            f"{name}: {one.witness}"
            for name, one in self._findings.items()
            if one.verdict == "fail"
        )
        return self.left_out_as(who) or [
            f"{who} fails: {first}" for first in itertools.islice(failing, 1)
        ]

    def left_out_as(self, who: str) -> list[str]:
        """That nothing is set against this record, which is that of ``who``; empty where it can be
        what happened.
        """
        return [f"{who} is left out: {why}" for why in self.contradictions[:1]]

    @cached_property
    def _findings(self) -> Mapping[str, Finding]:
        return check_all(self._evidence)

    @cached_property
    def _evidence(self) -> Evidence:
        expected = expected_of(self.resolved, self.cell, self.repeat, self.arm)
        controls = () if self.control is None else (self.control,)
        return Evidence(
            arm=self.arm,
            cell=self.cell,
            log=self.log,
            control=self.control,
            controls=controls,
            expected=replace(expected, twins=tuple(self.twins)),
        )

    def _of_another(self) -> Iterator[str]:
        """Whether the whole run is another arm's: its scenario came with it, and agrees with it."""
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
    """Whether a command is the planned one, but for what the harness put into it."""
    if not isinstance(said, list) or len(said) != len(planned):
        return False
    return all("$" in word or mine == word for mine, word in zip(said, planned, strict=True))


def without_twins(records: Mapping[str, ArmRecord]) -> dict[str, ArmRecord]:
    """The same, each with the arms that have the same log: two arms never took the same
    nanoseconds.
    """
    simulated = {
        name: (
            one.cell.scenario.launcher.kind == "sim" and one.cell.scenario.workload.command is None
        )
        for name, one in records.items()
    }
    twins = twins_of({name: one.log for name, one in records.items()}, simulated)
    return {name: replace(one, twins=twins.get(name, ())) for name, one in records.items()}
