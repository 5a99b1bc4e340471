"""Reads the stored runs of a comparison: each log once, judged once, within one memory budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.budget import Budget
from trainchaos.chaos.events.log import Kind, Log, read_log
from trainchaos.harness.compare.plan.directory import Directory, PlayedArm
from trainchaos.harness.compare.plan.plan import Arm
from trainchaos.harness.compare.result.believed import ArmRecord
from trainchaos.harness.host import seal
from trainchaos.harness.host.rundir import RunDirectory, read_resolved
from trainchaos.harness.judge.evidence.expected import refuse_unknown_launcher, refuse_wrong_params


@dataclass(kw_only=True)
class ComparedRuns:
    """The runs of a comparison; each log is read and judged once, all within one memory budget."""

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
            self.logs[arm] = log_of(run, self.budget)
        return self.logs[arm]

    def record(self, arm: Arm | None) -> ArmRecord | None:
        """An arm's log with its plan; None: it has no log, or the run does not state its plan."""
        log = self.log(arm)
        if arm is None or log is None:
            return None
        if arm not in self.records:
            self.records[arm] = _record(self._run(arm), log, arm)
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


def log_of(run: RunDirectory, budget: Budget) -> Log | None:
    """The log of a run's only arm; None if there is none. Raises LogError if it could not be read
    completely.
    """
    arms = run.arms()
    return log_in(run.events(arms[0]), budget) if arms else None


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


def _record(run: RunDirectory, log: Log, arm: Arm) -> ArmRecord | None:
    """The record; None if the run does not state its plan, or not in this version's format.
    Raises NewerVersion; ScenarioError, DamagedRun for parts of it that are not here or not ours.
    """
    try:
        resolved = read_resolved(run)
    except LogError:
        return None
    if log.first(Kind.RUN_STARTED) is None or not resolved.cells:
        return None
    refuse_unknown_launcher(resolved)
    refuse_wrong_params(resolved, run.resolved)
    name = arm.id.rpartition(".")[0]
    return ArmRecord(log=log, resolved=resolved, cell=resolved.cells[0], name=name, seed=arm.seed)
