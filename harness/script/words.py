"""How an arm of a command ended, in words that say what to do."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.scenario.model import RegexProgress
from chaos.scenario.workload import WorkloadSpec
from harness.script.listen.listening import Listener
from harness.script.listen.observer import Observer
from harness.script.processes.command import Ended

SHOWN_LINES = 6
SHOWN_WIDTH = 160


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is known at the end. ``ranks``: found, 0 for none; ``lines``, ``last``: of its output;
    ``refused``: reports that made no sense.
    """

    spec: WorkloadSpec
    reports: int
    committed: int
    finished: bool
    ranks: int
    lines: int
    last: tuple[str, ...]
    refused: int

    @classmethod
    def of(cls, spec: WorkloadSpec, observer: Observer, listener: Listener) -> Told:
        """By what was seen and heard of it."""
        return cls(
            spec=spec,
            reports=observer.reports,
            committed=observer.committed,
            finished=observer.finished,
            ranks=len(observer.members) if observer.generation else 0,
            lines=listener.lines,
            last=listener.last,
            refused=listener.refused,
        )


def ending(told: Told, ended: Ended | None) -> tuple[str, str]:
    """(outcome, reason). ``ended``: None when it made no progress for the deadline instead of
    ending.
    """
    limit_s, name = told.spec.patience(begun=bool(told.reports))
    deadline = f"{limit_s:g} s (workload.{name})"
    if ended is None:
        if not told.reports:
            return "timed-out", f"no progress within {deadline}: {_why_none(told)}"
        if told.finished:
            return (
                "timed-out",
                (
                    f"all {told.spec.steps} steps were reported, but the command had not ended"
                    f" {deadline} later"
                ),
            )
        return "timed-out", f"no step for {deadline} after step {told.committed}"
    if not told.reports and not ended.well:
        return (
            "gave-up",
            f"the command ended with {ended.how} before any progress was seen{_shown(told)}",
        )
    if not told.reports:
        return (
            "gave-up",
            f"the command ended with {ended.how} and no progress was seen: {_why_none(told)}",
        )
    if told.finished and ended.well:
        return "completed", ""
    where = f"at step {told.committed} of {told.spec.steps}"
    if ended.well:
        return (
            "gave-up",
            (
                f"the command ended with exit code 0 {where}: set workload.steps to what it"
                f" does{_shown(told)}"
            ),
        )
    return "gave-up", f"the command ended with {ended.how} {where}{_shown(told)}"


def _why_none(told: Told) -> str:
    if isinstance(told.spec.progress, RegexProgress):
        if not told.lines:
            return "it printed nothing, so workload.progress.regex found nothing"
        if told.refused:
            return (
                f"workload.progress.regex matched, but group step was never a number{_shown(told)}"
            )
        return f"workload.progress.regex matched none of {told.lines} lines{_shown(told)}"
    if told.refused:
        return f"{told.refused} lines of the beacon were not understood: copy chaos/beacon.py again"
    cure = "call chaos.beacon.step(...) after each step, or give progress: {regex: ...}"
    return f"no beacon was heard: {cure}{_shown(told)}"


def _shown(told: Told) -> str:
    if not told.last:
        return "; it printed nothing"
    lines = "\n".join(f"    | {line[:SHOWN_WIDTH]}" for line in told.last[-SHOWN_LINES:])
    return f"; its last lines:\n{lines}"
