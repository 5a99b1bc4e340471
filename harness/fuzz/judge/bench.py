"""Tests the judge: changes logs of a run that passes, and judges them like any others.

- The judge never raises, and takes at most ``MOST_CPU_S`` of processor time. It reports a log that
  makes no sense.
- No change that alters a claim goes unseen: if everything still passes, both arms have the same
  claims as before (``harness.fuzz.judge.claims``).
- The same logs get the same verdict twice, however their lines are formatted and whenever the
  machine was started.

Most logs are judged by the functions that ``judge`` consists of, without files. Before a change is
reported as unseen, and now and then, the logs are written to files and judged whole.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos.events.log import Kind, Log
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.fuzz.judge.claims import Claims, altered, backwards, claims_of
from trainchaos.harness.fuzz.judge.lines import ARMS, LogEdit, changed
from trainchaos.harness.fuzz.judge.neutral import WRITTEN, later
from trainchaos.harness.fuzz.play.coverage import Feature
from trainchaos.harness.fuzz.play.oracle import Find
from trainchaos.harness.fuzz.play.play import (
    LONGEST_S,
    ArmTimeout,
    PlayResult,
    bounded,
    due_of,
    evidence_of,
    memory,
    place_of,
    resolved_of,
    traceback_tail,
)
from trainchaos.harness.host.rundir import RunDirectory, arm_id, write_resolved
from trainchaos.harness.judge.checkers import check_all
from trainchaos.harness.judge.evidence.absurd import absurdity
from trainchaos.harness.judge.evidence.expected import Expected
from trainchaos.harness.judge.verdict.judge import judge

Tree = dict[str, Any]
MOST_CPU_S = 5.0
"""A log of the longest jobs drawn takes a tenth of this on a busy machine."""
TRIES = 2
"""How often a log is judged that takes longer than that."""
SENSELESS = "senseless"
"""Used in place of a checker: nothing in the log can be checked."""


@dataclass(frozen=True, kw_only=True)
class BaseRun:
    """A run in which everything passes. ``due``: arm -> what the scenario requires of it;
    ``order``: arm -> effects before their causes in the original log.
    """

    tree: Tree
    cell: Cell
    logs: Mapping[str, Log]
    due: Mapping[str, Expected]
    claims: Mapping[str, Claims]
    order: Mapping[str, frozenset[str]]


@dataclass(frozen=True, kw_only=True)
class JudgeView:
    """The judge's view of changed logs. ``same``: the changes have no effect; ``seen``: "arm:
    checker" -> its witness, for checkers that do not pass.
    """

    find: Find | None = None
    same: bool = False
    seen: Mapping[str, str]
    reached: frozenset[Feature] = frozenset()


def base_of(tree: Tree, played: PlayResult) -> BaseRun | None:
    """A scenario as a base; None if not everything passes, or if its times come from clocks of
    several machines.
    """
    cell, logs = played.cell, played.logs
    if (
        cell is None
        or played.left
        or any(finding.verdict != "pass" for finding in played.findings.values())
    ):
        return None
    if any(log.first(Kind.CLOCK_MEASURED) is not None for log in logs.values()):
        return None
    due: dict[str, Expected] = {arm: due_of(cell, arm) for arm in ARMS}
    return BaseRun(
        tree=tree,
        cell=cell,
        logs=logs,
        due=due,
        claims={arm: claims_of(evidence_of(cell, logs, arm, due[arm]).measures) for arm in ARMS},
        order={arm: frozenset(backwards(logs[arm])) for arm in ARMS},
    )


@dataclass(frozen=True, kw_only=True)
class JudgeBench:
    """``root``: directory for runs that are judged whole."""

    root: Path | None = None

    def look(self, base: BaseRun, changes: Sequence[LogEdit], *, whole: bool = False) -> JudgeView:
        """The judge's view of a base with these changes. ``whole``: judge it as a run directory in
        any case. Raises only what interrupts.
        """
        for _ in range(TRIES):
            begun_s = time.process_time()
            try:
                with bounded(LONGEST_S, "changed"):
                    looked = self._looked(base, changes, whole)
            except ArmTimeout as error:
                return JudgeView(find=Find(key="no end", text=str(error)), seen={})
            except Exception as error:
                return JudgeView(
                    find=Find(key=f"crash: {place_of(error)}", text=traceback_tail(error)), seen={}
                )
            took_s = time.process_time() - begun_s
            if looked.find is not None or whole or took_s <= MOST_CPU_S:
                return looked
        text = f"judging took {took_s:.1f} s of a processor, more than {MOST_CPU_S:g}"
        return JudgeView(find=Find(key=f"slow: {_about(changes)}", text=text), seen=looked.seen)

    def neutral(self, base: BaseRun) -> Find | None:
        """A find if the verdict changes although the logs' content does not. Raises only what
        interrupts.
        """
        try:
            with bounded(LONGEST_S, "changed"):
                return self._rewritten(base) or self._moved(base)
        except ArmTimeout as error:
            return Find(key="no end", text=str(error))
        except Exception as error:
            return Find(key=f"crash: {place_of(error)}", text=traceback_tail(error))

    def _rewritten(self, base: BaseRun) -> Find | None:
        root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=self.root or memory()))
        try:
            run = stored(root / "run", base.cell, base.logs)
            right = _results(run)
            for how, write in WRITTEN.items():
                again = stored(root / how, base.cell, base.logs, write)
                if _results(again) != right:
                    text = f"the log says the same with {how}, and is judged otherwise"
                    return Find(key=f"not alike: {how}", text=text)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        return None

    def _moved(self, base: BaseRun) -> Find | None:
        seen, claims = _judged(base, {arm: later(base.logs[arm]) for arm in ARMS})
        said = [f"{name}: {why}" for name, why in seen.items()]
        said += [f"{arm}: {one}" for arm in ARMS for one in altered(base.claims[arm], claims[arm])]
        if not said:
            return None
        key = f"not alike: all times later: {_claim(said[0])}"
        return Find(key=key, text="\n".join(["with all times an hour later", *said]))

    def _looked(self, base: BaseRun, changes: Sequence[LogEdit], whole: bool) -> JudgeView:
        logs: dict[str, Log]
        try:
            logs = {
                arm: changed(base.logs[arm], [c for c in changes if c.arm == arm]) for arm in ARMS
            }
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            # ``read_log`` rejects such a log as senseless
            return JudgeView(
                seen={SENSELESS: str(error)}, reached=_reached({SENSELESS: ""}, changes)
            )
        if all(logs[arm].events == base.logs[arm].events for arm in ARMS):
            return JudgeView(same=True, seen={})
        seen, claims = _judged(base, logs)
        find = None
        if whole:
            find = self._whole(base, logs)
        if find is None and not seen:
            find = self._unseen(base, logs, claims, changes)
        return JudgeView(find=find, seen=seen, reached=_reached(seen, changes))

    def _unseen(
        self,
        base: BaseRun,
        logs: Mapping[str, Log],
        claims: Mapping[str, Claims],
        changes: Sequence[LogEdit],
    ) -> Find | None:
        moves = [change.do == "move" for change in changes]
        said: list[str] = []
        for arm in ARMS:
            said += [
                f"{arm}: {one}"
                for one in altered(base.claims[arm], claims[arm], times=not any(moves))
            ]
            if all(moves):
                said += [f"{arm}: {one}" for one in sorted(backwards(logs[arm]) - base.order[arm])]
        if not said or self._verdict(base, logs) != "pass":
            return None
        return Find(key=f"unseen: {_claim(said[0])} by {_about(changes)}", text="\n".join(said))

    def _whole(self, base: BaseRun, logs: Mapping[str, Log]) -> Find | None:
        """Judge the logs twice as a run directory. Raises what the judge raises."""
        root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=self.root or memory()))
        try:
            run = stored(root / "run", base.cell, logs)
            first, second = (judge(run).model_dump_json() for _ in range(2))
        finally:
            shutil.rmtree(root, ignore_errors=True)
        return (
            None
            if first == second
            else Find(key="not the same twice", text="one run was judged in two ways")
        )

    def _verdict(self, base: BaseRun, logs: Mapping[str, Log]) -> str:
        root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=self.root or memory()))
        try:
            return judge(stored(root / "run", base.cell, logs)).verdict
        finally:
            shutil.rmtree(root, ignore_errors=True)


def _results(run: RunDirectory) -> str:
    """The complete results of a run, independent of the order of keys."""
    return json.dumps(judge(run).model_dump(mode="json"), sort_keys=True)


def stored(
    root: Path, cell: Cell, logs: Mapping[str, Log], write: Callable[[str], str] = str
) -> RunDirectory:
    """Both arms as a run directory that can be judged. ``write``: replaces the format of
    each line.
    """
    run = RunDirectory(root)
    root.mkdir()
    write_resolved(run, resolved_of(cell))
    for arm in ARMS:
        folder = run.events(arm_id(cell.id, 0, arm))
        folder.mkdir(parents=True)
        for name, actor in logs[arm].actors.items():
            lines = (write(event.to_line()) for event in actor.events)
            (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return run


def _judged(base: BaseRun, logs: Mapping[str, Log]) -> tuple[dict[str, str], dict[str, Claims]]:
    """Checkers that do not pass, and the claims, of both arms; as in ``judge``, an arm that cannot
    be judged is senseless.
    """
    seen: dict[str, str] = {}
    claims = dict(base.claims)
    for arm in ARMS:
        if arm == "control" and logs[arm] is base.logs[arm]:
            continue
        try:
            if absurd := absurdity(logs[arm], base.cell.scenario):
                raise ValueError(absurd)
            evidence = evidence_of(base.cell, logs, arm, base.due[arm])
            claims[arm] = claims_of(evidence.measures)
            findings = check_all(evidence)
        except Exception as error:
            seen[f"{arm}: {SENSELESS}"] = f"{type(error).__name__}: {error}"
            continue
        seen |= {f"{arm}: {name}": f.witness for name, f in findings.items() if f.verdict != "pass"}
    return seen, claims


def _reached(seen: Mapping[str, str], changes: Sequence[LogEdit]) -> frozenset[Feature]:
    who = [name.partition(": ")[2] or name for name in seen] or ["nobody"]
    return frozenset(("seen", name, change.about) for name in who for change in changes)


def _about(changes: Sequence[LogEdit]) -> str:
    return "; ".join(sorted({change.about for change in changes}))


def _claim(said: str) -> str:
    """The claim alone, without its values and numbers."""
    words = (
        said.partition(" was ")[0]
        .partition(" had ")[0]
        .partition(" before ")[0]
        .partition(" of ")[0]
    )
    return words.strip()
