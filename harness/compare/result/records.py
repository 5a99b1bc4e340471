"""Stored arms of a comparison: each log is read once, within one memory budget, and judged once
against its plan. Stored verdicts are not used.

A record that is not whole, and a failure of a checker in ``CONTRADICTS``, are no property of a
stack: the log is damaged, belongs to another arm, or contradicts itself. Its times are then
ignored, whichever side they favour. Failures of other checkers concern the job, the subject of the
comparison, and other inconclusive findings prove nothing against a record.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.log import Kind, Log, read_log
from trainchaos.chaos.scenario.model import Cell, ResolvedRun
from trainchaos.harness.compare.plan.directory import Directory, PlayedArm
from trainchaos.harness.compare.plan.plan import Arm
from trainchaos.harness.host import seal
from trainchaos.harness.host.rundir import RunDirectory, read_resolved
from trainchaos.harness.judge.checkers import CHECKERS, Evidence, check, check_all
from trainchaos.harness.judge.evidence.expected import (
    expected_of,
    refuse_unknown_launcher,
    refuse_wrong_params,
)
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
        findings = ((name, check(CHECKERS[name], self._evidence)) for name in CONTRADICTS)
        failing = [f"{name}: {one.witness}" for name, one in findings if one.verdict == "fail"]
        return [*self._of_another(), *failing]

    @property
    def history(self) -> History:
        """The arm put in order."""
        return self._evidence.history

    def verdict(self, stored: str) -> str:
        """The run's verdict, judged again; one that is none of ``THREE`` is kept."""
        if stored not in THREE:
            return stored
        return max(stored, merge([f.verdict for f in self._findings.values()]), key=THREE.index)

    def notes(self, who: str, *, failures: bool = True) -> list[str]:
        """At most one note for trials compared with this record, which belongs to ``who``: that it
        is left out, or with ``failures`` that it fails.
        """
        if self.contradictions:
            return [f"{who} is left out: {self.contradictions[0]}"]
        failing = (f"{n}: {f.witness}" for n, f in self._findings.items() if f.verdict == "fail")
        first = next(failing, "") if failures else ""
        return [f"{who} fails: {first}"] if first else []

    @cached_property
    def _findings(self) -> Mapping[str, Finding]:
        return check_all(self._evidence)

    @cached_property
    def _evidence(self) -> Evidence:
        return Evidence(
            arm=self.arm,
            cell=self.cell,
            log=self.log,
            control=self.control,
            controls=() if self.control is None else (self.control,),
            expected=expected_of(self.resolved, self.cell, self.repeat, self.arm),
        )

    def _of_another(self) -> Iterator[str]:
        """Signs that the whole run belongs to another arm: its scenario came with it, and agrees
        with it.
        """
        workload = self.cell.scenario.workload
        if self.name and self.cell.scenario.name != self.name:
            yield f"its run is one of {self.cell.scenario.name}, not of {self.name}"
        if self.seed is not None and self.resolved.seed != self.seed:
            yield f"its run has seed {self.resolved.seed}, planned is {self.seed}"
        if self.name and self.history.info.observed:
            # every stack trains the same job, whose ranks report their share of the global batch
            for (generation, step), samples in samples_of_steps(self.history).items():
                if samples > workload.global_batch:
                    yield (
                        f"step {step} of generation {generation} had {samples} samples, the global"
                        f" batch is {workload.global_batch}"
                    )
                    break
        for event in self.log.of(Kind.COMMAND_STARTED) if workload.command is not None else ():
            if not _same_words(event.data["argv"], list(workload.command or ())):
                argv = " ".join(map(str, event.data["argv"]))[:200]
                yield f"its command was {argv}, not that of its scenario"
                break


@dataclass(kw_only=True)
class ComparedRuns:
    """The runs of a comparison that was played."""

    directory: Directory
    played: Mapping[Arm, PlayedArm]
    logs: dict[Arm, Log | None] = field(default_factory=dict)
    records: dict[Arm, ArmRecord | None] = field(default_factory=dict)
    budget: Budget = field(default_factory=Budget)

    def log(self, arm: Arm | None) -> Log | None:
        """The log of an arm; None: not played, or the log is gone. Raises DamagedRun where the
        seal of its run is broken.
        """
        if arm is None or arm not in self.played:
            return None
        if arm not in self.logs:
            run = self._run(arm)
            seal.refuse_broken(run, seal.check(run))
            arms = run.arms()
            self.logs[arm] = log_in(run.events(arms[0]), self.budget) if arms else None
        return self.logs[arm]

    def record(self, arm: Arm | None) -> ArmRecord | None:
        """An arm's log with its plan; None: it has no log, or the run does not state its plan in
        this version's format. Raises NewerVersion; ScenarioError, DamagedRun for parts of it that
        are not here or not ours.
        """
        log = self.log(arm)
        if arm is None or log is None:
            return None
        if arm not in self.records:
            run = self._run(arm)
            try:
                resolved = read_resolved(run)
            except LogError:
                resolved = None
            if resolved is None or not resolved.cells or log.first(Kind.RUN_STARTED) is None:
                self.records[arm] = None
                return None
            refuse_unknown_launcher(resolved)
            refuse_wrong_params(resolved, run.resolved)
            self.records[arm] = ArmRecord(
                log=log,
                resolved=resolved,
                cell=resolved.cells[0],
                name=arm.id.rpartition(".")[0],
                seed=arm.seed,
            )
        return self.records[arm]

    def contradictions(self, arm: Arm | None) -> list[str]:
        """Why the arm's record is not credible."""
        record = self.record(arm)
        return record.contradictions if record is not None else []

    def trusted(self, arm: Arm | None) -> Log | None:
        """The log of an arm if its record is credible."""
        return None if self.contradictions(arm) else self.log(arm)

    def _run(self, arm: Arm) -> RunDirectory:
        return RunDirectory(self.directory.root / self.played[arm].run)


def log_in(events: Path, budget: Budget) -> Log | None:
    """The log of one arm; None if there is none. Raises LogError if it could not be read
    completely, or is of a newer version, as leaving out a trial would change the comparison.
    """
    try:
        log = read_log(events, budget)
    except LogError:
        return None
    if log.unread:
        raise LogError(f"{events}: {log.unread}")
    return log


def _same_words(said: object, planned: list[str]) -> bool:
    """Whether a command is the planned one, except for values filled in by the harness."""
    if not isinstance(said, list) or len(said) != len(planned):
        return False
    return all("$" in word or mine == word for mine, word in zip(said, planned, strict=True))
