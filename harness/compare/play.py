"""Plays the arms of a comparison one after the other, and records each; finished arms are not
played again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainchaos.chaos import plugins
from trainchaos.chaos.errors import (
    EXIT_HARNESS,
    EXIT_INTERRUPTED,
    EXIT_PASS,
    EXIT_TERMINATED,
    EXIT_UNSAFE,
    ScenarioError,
)
from trainchaos.chaos.loading.load import LoadedScenario, load
from trainchaos.chaos.planning.load import OthersLoad
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.harness.compare.plan import scenario
from trainchaos.harness.compare.plan.directory import ComparisonPlan, Directory, PlayedArm, now
from trainchaos.harness.compare.plan.plan import Arm, Entrant, Family, seconds_left
from trainchaos.harness.judge.results import Results
from trainchaos.harness.launch.workload import Workload
from trainchaos.harness.run.runner import run_scenario

UNUSABLE = ("broken", "interrupted", "unsafe", "skipped")
LOOK_S = 0.5
ENDING = {EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_UNSAFE}


@dataclass(frozen=True, kw_only=True)
class ArmProgress:
    """Progress of a comparison after one arm. ``left_s``: expected seconds for the
    remaining arms.
    """

    number: int
    total: int
    played: PlayedArm
    results: Results
    left_s: float


@dataclass(frozen=True, kw_only=True)
class ComparisonPlayer:
    """Plays the arms of a plan. ``pythons``: label -> interpreter of its stack's environment."""

    directory: Directory
    plan: ComparisonPlan
    entrants: Mapping[str, Entrant]
    families: Mapping[str, Family]
    pythons: Mapping[str, Path]
    catalogue: Catalogue

    def check(self) -> None:
        """Write and load one scenario of every stack and family before starting anything. Raises
        ScenarioError.
        """
        seen = set()
        for arm in self.plan.arms:
            if (arm.label, arm.family) not in seen:
                seen.add((arm.label, arm.family))
                self.scenario_of(arm)

    def corpus(self) -> Path:
        """The corpus that all arms train on, made once. Raises ScenarioError or
        InfrastructureError.
        """
        path = self.directory.data / "corpus.bin"
        if not path.exists():
            spec = next(iter(self.families.values())).cell.scenario.workload
            self.directory.data.mkdir(parents=True, exist_ok=True)
            made = plugins.load(plugins.WORKLOADS, Workload)[spec.kind](**spec.params)
            path = made.prepare(self.directory.data).path
        return path.absolute()

    def scenario_of(self, arm: Arm) -> LoadedScenario:
        """Write the scenario of an arm, and load it as ``chaos run`` would."""
        family, entrant = self.families[arm.like], self.entrants[arm.label]
        drive = entrant.stack.drive(family.job(arm.seed, self.corpus()), self.pythons[arm.label])
        path = self.directory.scenario(arm)
        scenario.write(
            path, scenario.scenario_of(arm, family, drive, deadline_s=self.plan.deadline)
        )
        try:
            return load(path, self.catalogue, overrides=[], env={})
        except ScenarioError as error:
            raise ScenarioError(
                f"{family.planned.path}: {arm.family or 'the control'} cannot be played under"
                f" {arm.label}:\n{error.message}",
                hint=error.hint or "faults on a command are those of docs/scripts.md",
            ) from error

    def play(self, said: Callable[[ArmProgress], None]) -> int:
        """Play all missing arms. ``said``: called after each arm. Returns an exit code: 0 all done,
        4 some arms broke and are still missing, 5 something could not be cleaned up, 130 or 143
        ended by a signal.
        """
        done = self.directory.played()
        took = {arm: played.seconds for arm, played in done.items()}
        missing = [arm for arm in self.plan.arms if arm not in done]
        code = EXIT_PASS
        for index, arm in enumerate(missing):
            played, results = self._one(arm)
            self.directory.add(played)
            if played.usable:
                took[arm] = played.seconds
            left, _ = seconds_left(missing[index + 1 :], took, self.plan.workloads)
            number = len(self.plan.arms) - len(missing) + index + 1
            said(
                ArmProgress(
                    number=number,
                    total=len(self.plan.arms),
                    played=played,
                    results=results,
                    left_s=left,
                )
            )
            if results.exit_code in ENDING:
                return results.exit_code
            code = code if played.usable else EXIT_HARNESS
        return code

    def _one(self, arm: Arm) -> tuple[PlayedArm, Results]:
        loaded, load = self.scenario_of(arm), OthersLoad()
        time.sleep(LOOK_S)  # nothing of ours runs meanwhile
        busy = load.share(os.cpu_count() or 1)
        started = time.monotonic()
        results = run_scenario(
            loaded, runs=self.directory.runs, seed=None, live=False, argv=["run", str(loaded.path)]
        )
        run = self.directory.runs / results.scenario / results.run_id
        played = PlayedArm(
            arm=arm,
            run=str(run.relative_to(self.directory.root)),
            verdict=results.verdict,
            usable=results.verdict not in UNUSABLE and bool(results.arms),
            seconds=time.monotonic() - started,
            finished=now(),
            busy=busy,
        )
        return played, results


def left_of(directory: Directory, plan: ComparisonPlan) -> tuple[Sequence[Arm], float, int]:
    """(missing arms, their expected seconds, number of arms whose time is a guess)."""
    done = directory.played()
    missing = [arm for arm in plan.arms if arm not in done]
    took = {arm: played.seconds for arm, played in done.items()}
    return missing, *seconds_left(missing, took, plan.workloads)
