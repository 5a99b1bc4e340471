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
from contextlib import suppress
from dataclasses import dataclass, replace
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
from trainchaos.harness.fuzz.play.child import child_program, ends, tail_of, undisturbed
from trainchaos.harness.fuzz.play.coverage import Feature, features_of
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
from trainchaos.harness.launch.launcher import Launcher

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
            load(path, self.catalogue, env=os.environ)  # sooner than a process of its own could
            return self._run(path, root)
        except ScenarioError as error:
            return PlayResult(refused=str(error))
        except Exception as error:
            return PlayResult(crash=traceback_tail(error), place=place_of(error))
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _run(self, path: Path, root: Path) -> PlayResult:
        before = MachineBefore(token=secrets.token_hex(8), since=start_time(os.getpid()))
        runs, env = root / "runs", {**os.environ, MARK: before.token}
        argv = [sys.executable, "-m", "trainchaos", "run", str(path), "--runs", str(runs), "-q"]
        try:
            with child_program(argv, env=env, output=root / "output") as child:
                overdue = not ends(child, self.longest_s)
            run, said = run_in(runs), tail_of(root / "output")
            logs = dict(logs_of(run))
            left = left_by(before, run, root, {child.pid, *pids_of(logs)})
            ended = RunExit(code=child.returncode, said=said, overdue=overdue, left=left)
            return played_of(ended, run, logs)
        finally:
            with undisturbed():
                clean(before, run_in(runs))


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
    played = PlayResult(left=ended.left, reached=reached)
    if ended.overdue:
        said = f"chaos run did not end in time\n{ended.said[-TOLD:]}"
        return replace(played, crash=said, place="no end")
    if trace := traceback_in([ended.said, *_agents_said(run)]):
        return replace(played, crash=trace, place=place_in(trace))
    if ended.code in REFUSED and not ended.left:
        return PlayResult(refused=reason)
    if ended.code not in JUDGED or results is None:
        how = f"exit code {ended.code}"
        place = f"{how}: {_without_paths(reason)}"
        return replace(played, crash=f"{how}: {reason}", place=place)
    unsafe = ended.code == errors.EXIT_UNSAFE
    arms = sorted(results.arms, key=lambda arm: arm.outcome != "completed")
    return replace(
        played,
        findings=findings_of(results),
        left=ended.left or ((reason,) if unsafe else ()),
        logs=logs,
        outcomes={arm.arm: arm.outcome for arm in arms},
    )


def findings_of(results: Results) -> dict[str, Finding]:
    """Findings by "arm: checker", the worst over the cells; plus findings for a missing arm and for
    a verdict that no checker explains.
    """
    found: dict[str, Finding] = {}
    for arm in results.arms:
        for name, finding in arm.invariants.items():
            worst = found.setdefault(f"{arm.arm}: {name}", finding)
            if WORST.index(finding.verdict) > WORST.index(worst.verdict):
                found[f"{arm.arm}: {name}"] = finding
    if missing := set(ARMS) - {arm.arm for arm in results.arms}:
        said = f"there is no {' and no '.join(sorted(missing))} arm"
        found["run: arms"] = Finding(verdict="fail", witness=said)
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
    for event in log.events:
        yield from features_of(stage, event.kind, event.data)
        if event.kind is Kind.GENERATION_READY:
            stage = "training"
        elif event.kind in (Kind.FAILURE_DETECTED, Kind.ABORT_SENT):
            stage = "recovering"


def _results(run: RunDirectory | None) -> Results | None:
    with suppress(OSError, ValueError):
        return read_model(run.results, Results) if run is not None else None
    return None


def _agents_said(run: RunDirectory | None) -> list[str]:
    paths = sorted((run.root / "nodes").glob("*.log")) if run is not None else []
    return [path.read_text(errors="replace") for path in paths]


def _without_paths(text: str) -> str:
    """The first line, without what differs between plays."""
    first = re.sub(r"/\S+", "PATH", text.split("\n", 1)[0])
    return re.sub(r"\d+(\.\d+)?", "#", first)[:160]
