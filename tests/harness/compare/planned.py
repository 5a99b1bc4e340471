"""A fault family in a file, stacks that start nothing, and what a command line asks of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.harness.compare import prepare
from trainchaos.harness.compare.environments.stack import CommonJob, Drive, Stack
from trainchaos.harness.compare.plan.directory import ComparisonPlan, Directory, PlayedArm
from trainchaos.harness.compare.plan.plan import Arm
from trainchaos.harness.compare.prepare import CompareOptions

FAMILY = """version: 1
name: {name}
description: something is done
workload: {{kind: gpt, size: nano, ranks: 2, steps: {steps}, global_batch: 8,
  checkpoint: {{every: 5}}}}
recovery: hot-spare
faults:
  - {fault}
"""
KILL = """{id: k, kind: process-kill, target: {select: one}, at: {step: 12, phase: any},
     expect: {outcome: recovered}}"""


class Plain(Stack):
    """One setting only, and a command that does nothing."""

    title: ClassVar[str] = "plain"

    def chosen(self) -> Mapping[str, object]:
        return dict(self.values)

    def drive(self, job: CommonJob, python: Path) -> Drive:
        env = job.environment() | {"WHO": "plain"}
        return Drive(argv=(str(python), "-c", "pass"), env=env, restarts=2)


def family_file(directory: Path, name: str, fault: str = KILL, steps: int = 30) -> Path:
    """The file of a family."""
    path = directory / f"{name}.yaml"
    path.write_text(FAMILY.format(name=name, fault=fault, steps=steps))
    return path


def asked(scenario: Path, **more: Any) -> CompareOptions:
    """What a command line says about one family."""
    given: dict[str, Any] = {
        "name": "x",
        "scenarios": [scenario],
        "stacks": [],
        "settings": "default",
        "repeat": 2,
        "seed": 7,
        "deadline": 20.0,
        "against": "",
        "same": False,
        "price": None,
        "currency": "USD",
        "skip_missing": False,
        "argv": ["compare"],
    }
    return CompareOptions(**{**given, **more})


def plan_for(wanted: CompareOptions, stacks: Mapping[str, type[Stack]]) -> ComparisonPlan:
    """The plan of these options."""
    return prepare.prepare(wanted, stacks, build_catalogue(), Directory(Path("unused"))).plan


def played(
    arm: Arm, run: str = "runs/x", directory: Directory | None = None, **more: Any
) -> PlayedArm:
    """A line about an arm, and its run's directory."""
    if directory is not None:
        (directory.root / run).mkdir(parents=True, exist_ok=True)
    told = {"usable": True, "verdict": "pass", "seconds": 3.0, "finished": "now"} | more
    return PlayedArm(arm=arm, run=run, **told)
