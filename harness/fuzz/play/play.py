"""Plays and judges one scenario, in the simulator with its files in memory: what it reached, and
what went wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from trainchaos.chaos import plugins
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.events.log import Log, read_log
from trainchaos.chaos.fault.base import Fault
from trainchaos.chaos.home import HOME
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.chaos.scenario.model import Cell, ResolvedRun
from trainchaos.chaos.schedule.plan import repeat_seed
from trainchaos.harness.fuzz.draw.text import as_yaml
from trainchaos.harness.fuzz.play.coverage import Feature, Observed
from trainchaos.harness.fuzz.play.simulated_arm import simulated_arm
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.checkers import Evidence, check_all
from trainchaos.harness.judge.evidence.expected import expected_of
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.launch.requirements import refuse_impossible
from trainchaos.harness.launchers.sim import Sim
from trainchaos.harness.sim.rank.behaviour import Behaviour
from trainchaos.harness.undo.ledger import read_open
from trainchaos.recovery.policy.strategy import Strategy

SAMPLES = 4096
LONGEST_S = 60.0
"""Limit of processor time for one arm of simulated time: a hundred times the usual duration. Real
time says little: a search runs where others have the processors.
"""
BLOCKED_TIMES = 10
"""Of it in real time, the arm waits for something that does not come."""
CONTROLS_KEPT = 50
IN_MEMORY = Path("/dev/shm")
ARMS: tuple[Literal["control", "faulted"], ...] = ("control", "faulted")


class ArmTimeout(BaseException):
    """An arm did not end in time. A BaseException, so that interrupted code does not catch it."""


@dataclass(frozen=True, kw_only=True)
class PlayResult:
    """The result of a scenario. ``refused``: why it was not played; ``crash``: the end of a
    traceback, ``place``: where it was raised; ``findings``: "arm: checker" -> its finding;
    ``left``: what was not cleaned up; ``digest``: of all logs; ``outcomes``: arm -> its outcome;
    ``cell``: the cell played.
    """

    refused: str = ""
    crash: str = ""
    place: str = ""
    findings: Mapping[str, Finding] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    digest: str = ""
    outcomes: Mapping[str, str] = field(default_factory=dict)
    reached: Collection[Feature] = frozenset()
    logs: Mapping[str, Log] = field(default_factory=dict)
    cell: Cell | None = None


@dataclass(frozen=True, kw_only=True)
class _Arm:
    outcome: str
    log: Log
    left: tuple[str, ...]
    digest: str


@dataclass(frozen=True, kw_only=True)
class SimPlayer:
    """Plays scenarios on the simulator. ``root``: directory for temporary files; ``behaviour``,
    ``strategy``: replacements with a planted defect.
    """

    catalogue: Catalogue
    root: Path | None = None
    behaviour: Callable[[], Behaviour] = Behaviour
    strategy: type[Strategy] | None = None
    _controls: dict[str, _Arm] = field(default_factory=dict)

    def play(self, tree: Mapping[str, Any]) -> PlayResult:
        """Load, play both arms, judge. Raises only what interrupts."""
        root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=self.root or memory()))
        reached: set[Feature] = set()
        crash = partial(PlayResult, reached=reached)
        try:
            return self._play(tree, root, reached)
        except ScenarioError as error:
            return PlayResult(refused=str(error))
        except ArmTimeout as error:
            return crash(crash=str(error), place="no end")
        except Exception as error:
            return crash(crash=traceback_tail(error), place=place_of(error))
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _play(self, tree: Mapping[str, Any], root: Path, reached: set[Feature]) -> PlayResult:
        path = root / "scenario.yaml"
        path.write_text(as_yaml(tree))
        (cell, *_) = load(path, self.catalogue).cells
        refuse_impossible(cell, Sim(**cell.scenario.launcher.params))
        arms = {"control": self._control(tree, cell, root)}
        arms["faulted"] = self._arm(cell, root / "run", "faulted", reached)
        logs = {name: arm.log for name, arm in arms.items()}
        return PlayResult(
            findings=dict(judged(cell, logs)),
            left=tuple(record for arm in arms.values() for record in arm.left),
            digest="".join(arm.digest for arm in arms.values()),
            reached=reached,
            logs=logs,
            cell=cell,
            outcomes={name: arm.outcome for name, arm in arms.items()},
        )

    def _control(self, tree: Mapping[str, Any], cell: Cell, root: Path) -> _Arm:
        """The control arm, played once for all scenarios that differ only in their faults; a
        repeated play reuses it as well.
        """
        key = json.dumps({name: value for name, value in tree.items() if name != "faults"})
        if key not in self._controls:
            arm = self._arm(cell, root / "alone", "control", set())
            while len(self._controls) >= CONTROLS_KEPT:
                del self._controls[next(iter(self._controls))]
            self._controls[key] = arm
        return self._controls[key]

    def _arm(
        self, cell: Cell, root: Path, arm: Literal["control", "faulted"], reached: set[Feature]
    ) -> _Arm:
        played, events = simulated_arm(
            cell,
            root,
            seed=repeat_seed(cell.scenario.seed, 0),
            samples=SAMPLES,
            arm=arm,
            kind=Observed,
            behaviour=self.behaviour,
            instead=self.strategy,
        )
        assert isinstance(played, Observed)
        try:
            with bounded(LONGEST_S, arm):
                outcome = played.run()
        finally:
            reached |= played.reached
        left = tuple(str(record) for record in read_open(RunDirectory(root).ledger))
        return _Arm(outcome=outcome, log=read_log(events), left=left, digest=digest(root))


def judged(cell: Cell, logs: Mapping[str, Log]) -> Iterator[tuple[str, Finding]]:
    """Findings of all checkers on both arms."""
    for arm in ARMS:
        evidence = Evidence(
            arm=arm,
            cell=cell,
            log=logs[arm],
            control=logs["control"] if arm == "faulted" else None,
            controls=(logs["control"],),
            exact={name: kind.exact for name, kind in strategies().items()},
            expected=expected_of(resolved_of(cell), cell, 0, arm),
        )
        for name, finding in check_all(evidence).items():
            yield f"{arm}: {name}", finding


def resolved_of(cell: Cell) -> ResolvedRun:
    """A run of this one cell."""
    return ResolvedRun(
        run_id="", source="", started="", reproduce="", seed=cell.scenario.seed, cells=[cell]
    )


def simulated(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The same scenario on the simulator."""
    spec = tree["launcher"]
    if spec["kind"] == "sim":
        return dict(tree)
    kept = {name: value for name, value in spec.items() if name in ("nodes", "nodes_per_rack")}
    return {**tree, "launcher": {"kind": "sim", **kept}}


def memory() -> Path | None:
    """A directory in memory; None if there is none."""
    return IN_MEMORY if IN_MEMORY.is_dir() else None


def kinds() -> Mapping[str, type[Fault]]:
    """All kinds of fault."""
    return plugins.load(plugins.FAULTS, Fault)


def strategies() -> Mapping[str, type[Strategy]]:
    """All strategies."""
    return plugins.load(plugins.STRATEGIES, Strategy)


def digest(root: Path) -> str:
    """Digest of every byte of a run's logs."""
    made = hashlib.blake2b(digest_size=16)
    for path in sorted((root / "events").rglob("*.jsonl")):
        made.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return made.hexdigest()


@contextlib.contextmanager
def bounded(seconds: float, what: str) -> Iterator[None]:
    """Raise ArmTimeout in this thread, which must be the main one, after ``seconds`` of processor
    time, or BLOCKED_TIMES as many of real time.
    """
    real_s, fired = seconds * BLOCKED_TIMES, False

    def over(signum: int, frame: FrameType | None) -> None:
        nonlocal fired
        if fired:  # both limits at once: what the first has raised is on its way
            return
        fired = True
        where = "".join(traceback.format_stack(frame, limit=4)) if frame else ""
        blocked = signum == signal.SIGALRM
        limit = f"{real_s:.0f} s" if blocked else f"{seconds:.0f} s of a processor"
        raise ArmTimeout(f"the {what} arm did not end within {limit}\n{where}")

    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, real_s),
    )
    before = [signal.signal(signum, over) for signum, _, _ in timers]
    for _, timer, limit_s in timers:
        signal.setitimer(timer, limit_s)
    try:
        yield
    finally:
        for (signum, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(signum, handler)


def traceback_tail(error: Exception) -> str:
    """The end of its traceback."""
    return "".join(traceback.format_exception(error, limit=-4)).strip()


def place_of(error: Exception) -> str:
    """Its type, and where it was raised; equal for the same defect."""
    frames = traceback.extract_tb(error.__traceback__)
    where = place_in_rooms(frames[-1].filename, frames[-1].name) if frames else "?"
    return f"{type(error).__name__} in {where}"


def place_in_rooms(file: str, function: str) -> str:
    """A function of a file by its path from the project's root, ``recovery/data/order.py of``; for
    a file of another project, by the last two parts of the path.
    """
    path = Path(file).resolve()
    ours = path.is_relative_to(HOME)
    return f"{path.relative_to(HOME) if ours else Path(*path.parts[-2:])} {function}"
