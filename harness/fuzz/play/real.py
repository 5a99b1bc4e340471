"""Plays one scenario with real processes: by ``chaos run`` in a separate process, as a user starts
it; then checks its output, exit code, results and the machine.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos import errors, plugins
from trainchaos.chaos.errors import LogError, ScenarioError
from trainchaos.chaos.events.log import Kind, Log, read_log
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.files import read_model
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.harness.fuzz.draw.text import as_yaml
from trainchaos.harness.fuzz.play.child import ChildProgram, undisturbed
from trainchaos.harness.fuzz.play.coverage import Feature
from trainchaos.harness.fuzz.play.leftovers import MARK, MachineBefore, clean, left_by
from trainchaos.harness.fuzz.play.play import (
    ARMS,
    PlayResult,
    place_in_rooms,
    place_of,
    traceback_tail,
)
from trainchaos.harness.host.processes import start_time
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Finding, Results
from trainchaos.harness.launch.capabilities import too_small
from trainchaos.harness.launch.launcher import Launcher
from trainchaos.harness.launch.requirements import lacking, refuse_impossible
from trainchaos.harness.run.timeouts import refuse_clashing

LONGEST_S = 300.0
"""Limit for a whole run: ten times the usual duration, and longer than two arms without a step take
to be given up.
"""
TOLD = 4000
"""Characters of output that are kept."""
TRACEBACK = "Traceback (most recent call last)"
JUDGED = frozenset(
    {
        errors.EXIT_PASS,
        errors.EXIT_FAIL,
        errors.EXIT_INCONCLUSIVE,
        errors.EXIT_UNSAFE,
        errors.EXIT_HALTED,
    }
)
"""Exit codes of runs that ended regularly, with any verdict."""
REFUSED = frozenset({errors.EXIT_USAGE, errors.EXIT_SKIPPED})
WORST = ("pass", "inconclusive", "fail")


@dataclass(frozen=True, kw_only=True)
class RunExit:
    """How ``chaos run`` ended. ``overdue``: it was ended by force; ``left``: what it left on the
    machine.
    """

    code: int | None
    said: str
    overdue: bool = False
    left: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RealPlayer:
    """Plays scenarios with processes of this machine. ``root``: directory for temporary files;
    ``longest_s``: time limit of each.
    """

    catalogue: Catalogue
    root: Path | None = None
    longest_s: float = LONGEST_S

    def play(self, tree: Mapping[str, Any]) -> PlayResult:
        """Load, run, inspect the result. Raises only what interrupts, after cleaning up."""
        root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=self.root)).resolve()
        try:
            path = root / "scenario.yaml"
            path.write_text(as_yaml(tree))
            if why := self._refusal(path):
                return PlayResult(refused=why)
            return self._run(path, root)
        except Exception as error:
            return PlayResult(crash=traceback_tail(error), place=place_of(error))
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _refusal(self, path: Path) -> str:
        """Why it cannot be played, by the checks of ``chaos run`` before it starts anything; empty
        if it can.
        """
        try:
            for cell in load(path, self.catalogue, env=os.environ).cells:
                launcher = launcher_of(cell.scenario.launcher.kind, **cell.scenario.launcher.params)
                launcher.check(cell)
                refuse_impossible(cell, launcher)
                refuse_clashing(cell.scenario)
                if why := too_small(cell) or launcher.missing(cell) or lacking(cell, launcher):
                    return why
        except ScenarioError as error:
            return str(error)
        return ""

    def _run(self, path: Path, root: Path) -> PlayResult:
        token = secrets.token_hex(8)
        before = MachineBefore.now(token, start_time(os.getpid()))
        argv = [
            sys.executable,
            "-m",
            "trainchaos",
            "run",
            str(path),
            "--runs",
            str(root / "runs"),
            "-q",
        ]
        try:
            with ChildProgram(
                argv, env={**os.environ, MARK: token}, output=root / "output"
            ) as child:
                overdue = not child.await_end(self.longest_s)
            run = run_in(root / "runs")
            logs = dict(logs_of(run))
            left = left_by(before, run, root, {child.pid, *pids_of(logs)})
            return played_of(
                RunExit(code=child.code, said=child.said, overdue=overdue, left=left), run, logs
            )
        finally:
            with undisturbed():
                clean(before, run_in(root / "runs"))


def launcher_of(kind: str, **params: Any) -> Launcher:
    """A launcher by its name."""
    return plugins.load(plugins.LAUNCHERS, Launcher)[kind](**params)


def playable(kinds: Mapping[str, type[Fault]], launcher: Launcher) -> dict[str, type[Fault]]:
    """The kinds of fault whose needs a launcher meets on this machine."""
    return {
        name: kind
        for name, kind in kinds.items()
        if kind.needs <= launcher.offers and not any(launcher.lacks(need) for need in kind.needs)
    }


def run_in(runs: Path) -> RunDirectory | None:
    """The only run below ``runs``; None if it was not started."""
    found = [path for path in runs.glob("*/*") if path.is_dir() and not path.is_symlink()]
    return RunDirectory(found[0]) if found else None


def logs_of(run: RunDirectory | None) -> Iterator[tuple[str, Log]]:
    """Arm -> its log, for arms with a readable log."""
    for name in run.arms() if run is not None else ():
        assert run is not None
        try:
            yield name, read_log(run.events(name))
        except LogError:
            continue  # the judge read it too, and reports it


def pids_of(logs: Mapping[str, Log]) -> set[int]:
    """Pids of all processes of an arm."""
    return {
        int(event.data["pid"]) for log in logs.values() for event in log.of(Kind.PROCESS_SPAWNED)
    }


def played_of(ended: RunExit, run: RunDirectory | None, logs: Mapping[str, Log]) -> PlayResult:
    """The result of a scenario, from its run's end and files."""
    results = _results(run)
    reason = (results.reason if results is not None else "") or ended.said[-TOLD:]
    reached = frozenset(feature for log in logs.values() for feature in reached_in(log))
    if ended.overdue:
        return PlayResult(
            crash=f"chaos run did not end in time\n{ended.said[-TOLD:]}",
            place="no end",
            left=ended.left,
        )
    if trace := traceback_in([ended.said, *_agents_said(run)]):
        return PlayResult(crash=trace, place=place_in(trace), left=ended.left, reached=reached)
    if ended.code in REFUSED and not ended.left:
        return PlayResult(refused=reason)
    if ended.code not in JUDGED or results is None:
        how = f"exit code {ended.code}"
        return PlayResult(
            crash=f"{how}: {reason}", place=f"{how}: {_without_paths(reason)}", left=ended.left
        )
    left = ended.left or ((reason,) if ended.code == errors.EXIT_UNSAFE else ())
    return PlayResult(
        findings=findings_of(results),
        left=left,
        reached=reached,
        logs=logs,
        outcomes={
            arm.arm: arm.outcome
            for arm in sorted(results.arms, key=lambda arm: arm.outcome != "completed")
        },
    )


def findings_of(results: Results) -> dict[str, Finding]:
    """Findings by "arm: checker", the worst over the cells; plus findings for a missing arm and for
    a verdict that no checker explains.
    """
    found: dict[str, Finding] = {}
    for arm in results.arms:
        for name, finding in arm.invariants.items():
            key = f"{arm.arm}: {name}"
            if key not in found or WORST.index(finding.verdict) > WORST.index(found[key].verdict):
                found[key] = finding
    if missing := set(ARMS) - {arm.arm for arm in results.arms}:
        found["run: arms"] = Finding(
            verdict="fail", witness=f"there is no {' and no '.join(sorted(missing))} arm"
        )
    unsaid = all(finding.verdict == "pass" for finding in found.values())
    if unsaid and results.verdict in ("fail", "inconclusive"):
        verdict = "fail" if results.verdict == "fail" else "inconclusive"
        found["run: verdict"] = Finding(verdict=verdict, witness=results.reason)
    return found


def traceback_in(texts: Sequence[str]) -> str:
    """The last traceback that a program printed; empty if there is none."""
    for text in texts:
        if TRACEBACK in text:
            return text[text.rindex(TRACEBACK) :][:TOLD].strip()
    return ""


def place_in(trace: str) -> str:
    """The error's type, and where it was raised, in the format of ``play.place_of``."""
    frames = re.findall(r'File "([^"]+)", line \d+, in (\S+)', trace)
    raised = next((line for line in trace.splitlines()[1:] if re.match(r"[\w.]+(:|$)", line)), "?")
    where = place_in_rooms(*frames[-1]) if frames else "?"
    return f"{raised.partition(':')[0].rpartition('.')[2]} in {where}"


def reached_in(log: Log) -> Iterator[Feature]:
    """Features as in ``coverage.Observed``, as far as a log shows them: only whether the job
    trained or recovered at the time.
    """
    stage = "starting"
    for event in log.of(
        Kind.GENERATION_READY,
        Kind.FAILURE_DETECTED,
        Kind.ABORT_SENT,
        Kind.DECISION,
        Kind.FAULT_INJECTED,
    ):
        if event.kind is Kind.GENERATION_READY:
            stage = "training"
        elif event.kind is Kind.FAULT_INJECTED:
            yield ("hit", stage, event.data["kind"], str(event.data.get("phase")))
        elif event.kind is Kind.DECISION:
            yield from (
                ("decided", stage, str(act).partition("(")[0]) for act in event.data["actions"]
            )
        else:
            if event.kind is Kind.FAILURE_DETECTED:
                yield ("failed", stage, event.data["cause"])
            stage = "recovering"


def _results(run: RunDirectory | None) -> Results | None:
    if run is None:
        return None
    try:
        return read_model(run.results, Results)
    except (OSError, ValueError):
        return None


def _agents_said(run: RunDirectory | None) -> list[str]:
    paths = sorted((run.root / "nodes").glob("*.log")) if run is not None else []
    return [path.read_text(errors="replace") for path in paths]


def _without_paths(text: str) -> str:
    """The first line, without what differs between plays."""
    first = re.sub(r"/\S+", "PATH", text.split("\n", 1)[0])
    return re.sub(r"\d+(\.\d+)?", "#", first)[:160]
