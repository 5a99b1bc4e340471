"""Layout of a comparison on disk, and the provenance that must match for its arms to be comparable.

runs/compare/<name>/
    plan.json  trials.jsonl  data/corpus.bin  scenarios/<arm>.yaml
    runs/<arm>/<time>-<seed>/                        (ordinary run directories)
    compare.json  compare.html  compare.md           (derived)
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from trainchaos.chaos.commit import commit_of
from trainchaos.chaos.errors import InfrastructureError, LogError, NoRun, ScenarioError
from trainchaos.chaos.files import (
    open_regular,
    parse_model,
    read_bytes,
    read_model,
    reason,
    write_whole,
)
from trainchaos.chaos.home import HOME
from trainchaos.harness.compare.environments.stack import Settings, Way
from trainchaos.harness.compare.plan.plan import Arm, PlannedFamily
from trainchaos.harness.host import dns_check, processes
from trainchaos.harness.judge.figures import Model
from trainchaos.harness.launch import devices

SCHEMA_VERSION = 1
CODE = ("chaos", "recovery", "harness")
SAME = ("code", "python", "cores", "processor", "host", "cuda_devices", "versions")
"""Facts whose change between arms must be reported; a reboot of the machine is reported too."""


class PlannedStack(Model):
    """A stack as planned. ``ranks_beside``: provisioned processes besides the ranks (spares);
    ``not_offered``: family -> why the stack cannot take part; ``way``: see
    ``harness.compare.environments.stack.Way``; ``against``: the stack it is compared with, empty:
    the plan's reference.
    """

    label: str
    name: str
    settings: Settings
    ours: bool
    title: str
    chosen: dict[str, Any]
    because: str
    versions: dict[str, str]
    fidelity: list[str]
    ranks_beside: int = 0
    not_offered: dict[str, str] = Field(default={})
    way: Way = "restart"
    against: str = ""


class ComparisonPlan(Model):
    """Content of ``plan.json``. ``deadline``: seconds without a new step after which an arm is
    over; ``skipped``: label -> why it does not take part; ``changes``: differences found when the
    comparison was resumed; ``closed``: the comparison claims the closed division of
    docs/benchmark-rules.md; ``tune``: the stack whose options are swept, if any; ``without``:
    (stack, family) pairs left out.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    started: str
    argv: list[str]
    seeds: list[int]
    deadline: float
    reference: str
    same: bool
    price: float | None
    currency: str
    families: list[PlannedFamily]
    stacks: list[PlannedStack]
    skipped: dict[str, str]
    arms: list[Arm]
    provenance: dict[str, Any]
    changes: list[str] = Field(default=[])
    closed: bool = False
    tune: str = ""
    without: list[tuple[str, str]] = Field(default=[])

    @property
    def workloads(self) -> dict[str, tuple[str, int, int, int, int]]:
        """Family -> what it trains."""
        return {family.name: family.workload for family in self.families}


class PlayedArm(Model):
    """A line of ``trials.jsonl``: one arm that was played. ``run``: directory relative to the
    comparison's; ``usable``: False if the harness failed or was stopped, so that the arm proves
    nothing; ``busy``: share of the processors used by other programs just before it began, None:
    not measured.
    """

    arm: Arm
    run: str
    usable: bool
    verdict: str
    seconds: float
    finished: str
    busy: float | None = None


class Directory:
    """One comparison's files: its ``plan``, the ``trials`` played, the directories of their
    ``runs``, and the ``data`` that all train on, made once.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plan, self.trials = root / "plan.json", root / "trials.jsonl"
        self.runs, self.data = root / "runs", root / "data"

    def scenario(self, arm: Arm) -> Path:
        """The scenario file that one arm is run with."""
        return self.root / "scenarios" / f"{arm.id}.yaml"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the comparison's lock while playing it. Raises InfrastructureError if another
        process holds it, or the lock file cannot be opened.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _refused(self.root, error) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InfrastructureError(
                    f"{self.root}: another chaos compare plays it",
                    hint="wait for it, or give another --name",
                ) from error
            yield
        finally:
            os.close(descriptor)

    def write_plan(self, plan: ComparisonPlan) -> None:
        """Write the plan atomically. Raises InfrastructureError if it cannot be written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            write_whole(self.plan, json.dumps(plan.model_dump(mode="json"), indent=1) + "\n")
        except OSError as error:
            raise _refused(self.plan, error) from error

    def read_plan(self) -> ComparisonPlan:
        """Raises NoRun when there is none, LogError when it is damaged, NewerVersion."""
        try:
            return read_model(self.plan, ComparisonPlan)
        except FileNotFoundError:
            raise NoRun(
                f"{self.root} is not a comparison (no {self.plan.name})",
                hint="they lie in runs/compare/<name>",
            ) from None
        except (OSError, ValueError) as error:
            raise LogError(f"{self.plan} is damaged: {reason(error)}") from error

    def add(self, played: PlayedArm) -> None:
        """Record one arm. Raises InfrastructureError if it cannot be written."""
        line = json.dumps(played.model_dump(mode="json"), allow_nan=False) + "\n"
        try:
            with open_regular(self.trials, flags=os.O_RDWR | os.O_CREAT) as stream:
                # remove a line torn by a power failure
                stream.truncate(stream.read().rfind(b"\n") + 1)
                stream.seek(0, os.SEEK_END)
                stream.write(line.encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise _refused(self.trials, error) from error

    def played(self) -> dict[Arm, PlayedArm]:
        """The newest usable record of each arm whose run still exists; a torn last line
        is ignored.
        """
        found: dict[Arm, PlayedArm] = {}
        for one in self._lines():
            if one.usable and (self.root / one.run).is_dir():
                found[one.arm] = one
        return found

    def _lines(self) -> Iterator[PlayedArm]:
        try:
            lines = read_bytes(self.trials).split(b"\n")[:-1]
        except FileNotFoundError:
            return
        except OSError as error:
            raise LogError(f"{self.trials} is damaged: {reason(error)}") from error
        for number, line in enumerate(lines, start=1):
            try:
                one = parse_model(line, PlayedArm)
                if ".." in Path(one.run).parts or Path(one.run).is_absolute() or "\0" in one.run:
                    raise ValueError("run: it leads out of the comparison")
                yield one
            except ValueError as error:
                raise LogError(
                    f"{self.trials}:{number} is damaged: {reason(error)}",
                    hint="remove that line: its arm is then played again",
                ) from error


def now() -> str:
    """The current time in the format of plans and trials."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def provenance() -> dict[str, Any]:
    """Machine, software, and version of this code: a digest of its sources, and its
    commit if any.
    """
    return devices.describe() | {
        "boot": processes.boot_id(),
        "slowest_lookup_s": round(dns_check.slowest_lookup_s(), 3),
        "code": code_digest(HOME),
        "commit": commit_of(HOME),
    }


def code_digest(root: Path) -> str:
    """Digest of every Python file that takes part in an arm or judges it."""
    total = hashlib.sha256()
    for package in CODE:
        for path in sorted((root / package).rglob("*.py")):
            total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Relevant differences between two provenances, in words."""
    found = []
    for key in SAME:
        if before.get(key) == now.get(key):
            continue
        if key == "code":
            commits = [str(one.get("commit") or "no commit")[:12] for one in (before, now)]
            found.append(f"the code of chaos ({commits[0]} then, {commits[1]} now)")
        else:
            found.append(
                f"{key.replace('_', ' ')} ({_said(before.get(key))} then, {_said(now.get(key))}"
                " now)"
            )
    return found


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    return str(value)


def refuse_other(old: ComparisonPlan, new: ComparisonPlan) -> None:
    """Raise ScenarioError if a directory holds a different comparison than requested.

    Additional seeds, stacks and families extend a comparison; fewer or changed ones make it a
    different one.
    """
    wrong = []
    for what, before, now in (
        ("stacks", [s.label for s in old.stacks], [s.label for s in new.stacks]),
        ("fault families", [f.name for f in old.families], [f.name for f in new.families]),
        ("seeds", old.seeds, new.seeds),
    ):
        lost = [str(one) for one in before if one not in now]
        if lost:
            wrong.append(f"it has {what} that this command leaves out: {', '.join(lost)}")
    digests = {family.name: family.digest for family in new.families}
    wrong += [
        f"the fault family {one.name} has changed"
        for one in old.families
        if digests.get(one.name, one.digest) != one.digest
    ]
    settings = {stack.label: stack.chosen for stack in new.stacks}
    wrong += [
        f"the settings of {one.label} have changed"
        for one in old.stacks
        if settings.get(one.label, one.chosen) != one.chosen
    ]
    if old.deadline != new.deadline:
        wrong.append(f"its deadline is {old.deadline:g} s, not {new.deadline:g} s")
    if wrong:
        raise ScenarioError(
            f"the directory holds another comparison: {'; '.join(wrong)}",
            hint=(
                "--resume alone goes on with it as it was planned; --name begins another one,"
                " --anew in its place"
            ),
        )


def _refused(path: Path, error: OSError) -> InfrastructureError:
    return InfrastructureError(
        f"cannot write {path}: {error.strerror}",
        hint="choose another place with --runs, or free disk space",
    )
