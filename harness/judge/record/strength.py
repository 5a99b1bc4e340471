"""How many ranks a command started and ended with: a job that goes on with fewer is degraded.

If every rank makes its own reports, they decide: a rank that reports none of the last steps no
longer takes part, whatever happened to its process. Otherwise the members of the last generation
count, except those that had ended, or were stopped by a fault, before the last steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.kept_in_memory import stops

LAST = 5
"""Number of last reported steps that decide which ranks still take part."""


@dataclass(frozen=True, kw_only=True)
class Strength:
    """Ranks found at the start, and those that took part in the last steps. ``gone``: label of each
    rank that no longer did -> since when, ns.
    """

    began: int
    ended: int
    gone: Mapping[str, int]

    @property
    def short(self) -> str:
        """Message such as ``3 of 4 ranks at the end: rank 1 (w1) gone``; "" if all took part."""
        if self.ended >= self.began:
            return ""
        who = f": {', '.join(sorted(self.gone))} gone" if self.gone else ""
        return f"{self.ended} of {self.began} ranks at the end{who}"


def half_known(history: History) -> str:
    """Why targets and blame cannot be determined: not all ranks of a command were found; "" if they
    were.
    """
    found, ranks = history.found, history.info.ranks
    return (
        f"{found} of {ranks} ranks were found"
        if (history.info.observed and history.generations and found != ranks)
        else ""
    )


def strength_of(history: History) -> Strength:
    """Strength of a command's arm. One without reports ends as it started."""
    began, last = history.found, _last_reports(history)
    if not last or not history.worked:
        return Strength(began=began, ended=began, gone={})
    if _all_report(history, began):
        there = {event.data["rank"] for event in last}
        gone = {
            f"rank {rank}": at for rank, at in _missed_since(history).items() if rank not in there
        }
        return Strength(began=began, ended=len(there), gone=gone if len(there) < began else {})
    members = history.worked[-1].members
    since, until = min(e.time_ns for e in last), max(e.time_ns for e in last)
    away = {name: at for name, at in history.exited_ns.items() if at < since}
    away |= {
        name: begun for name, begun, end in stops(history.log) if begun < since and end > until
    }
    gone = {name: away[name] for name in members if name in away}
    replaced = _replaced(history)
    before = {name: at for name, at in history.exited_ns.items() if name in replaced}
    return Strength(began=began, ended=len(members) - len(gone), gone=gone or before)


def _last_reports(history: History) -> list[Event]:
    """Reports of the last steps by the last generation that made any step."""
    number = max((run.generation for run in history.runs), default=0)
    mine = [event for event in history.reports if event.generation == number]
    steps = sorted({event.step or 0 for event in mine})[-LAST:]
    return [event for event in mine if (event.step or 0) in steps]


def _all_report(history: History, began: int) -> bool:
    """Whether every rank reports for itself, as seen in the first generation."""
    reports, first = history.reports, history.generations[0].number
    ranks = {event.data["rank"] for event in reports if event.generation == first}
    return len(ranks) >= began and all(event.data["rank"] is not None for event in reports)


def _missed_since(history: History) -> dict[int, int]:
    """Rank -> when another rank was first two reports beyond its last; else the time of its last
    report.
    """
    reports = history.reports
    steps = sorted({event.step or 0 for event in reports})
    last = {int(event.data["rank"]): event for event in reports}
    missed = {}
    for rank, own in last.items():
        beyond = [step for step in steps if step > (own.step or 0)][1:2]
        later = (
            e.time_ns
            for e in reports
            if beyond and e.time_ns > own.time_ns and (e.step or 0) >= beyond[0]
        )
        missed[rank] = min(later, default=own.time_ns)
    return missed


def _replaced(history: History) -> set[str]:
    """Members of the last but one generation that are not in the last."""
    if len(history.worked) < 2:
        return set()
    return set(history.worked[-2].members) - set(history.worked[-1].members)
