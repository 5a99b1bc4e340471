"""What a command's reports and exits say, of which nothing is known but what was seen from outside:
what follows from the loss of a rank, when it has recovered, its losses, and its ranks at the end.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.history import NS, History, StepRun
from trainchaos.harness.judge.record.kept_in_memory import stops

# ---- what follows from the loss of a rank
#
# A command that waits for all its processes fails once the survivors are through, long after one
# of them died. A launcher may end survivors only some seconds after one rank died. Both belong to
# the incident that the loss began, and their steps look like a recovery until then.


def follows(history: History, failure: Event, event: Event) -> bool:
    """Whether a failure of a command, or of one of its processes, follows from an earlier failure
    of a process.
    """
    late = event.data["cause"] == "exit" and event.time_ns > failure.time_ns
    if not (late and history.info.observed):
        return False
    if event.data["process"] is None:
        again = started_again_ns(history, failure)
        in_time = again is None or event.time_ns < again
        return in_time and _lost_for_good(history, failure, event.generation)
    # one that was left after another was lost: nothing was started or injected in between
    before = history.generation(failure.generation)
    since = [g for g in history.generations if failure.generation < g.number <= event.generation]
    if before is None or not since or since[-1].world >= before.world:
        return False
    hit = (fault.time_ns for fault in history.log.of(Kind.FAULT_INJECTED))
    return all(set(before.members).issuperset(g.members) for g in since) and not any(
        failure.time_ns < at <= event.time_ns for at in hit
    )


def ended_ns(history: History, failure: Event) -> int | None:
    """When a command, or its survivors, failed last because of the failure of one of its processes,
    started again or not, ns; None if they did not.
    """
    failures = history.log.of(Kind.FAILURE_DETECTED)
    ends = [e.time_ns for e in failures if follows(history, failure, e)]
    last = history.generations[-1].number if history.generations else 0
    gave_up = history.outcome == "gave-up" and started_again_ns(history, failure) is None
    if not ends and gave_up and _lost_for_good(history, failure, last):
        return history.end_ns
    return max(ends, default=None)


def started_again_ns(history: History, failure: Event) -> int | None:
    """When the command was next started after a failure; None: it was not."""
    starts = (event.time_ns for event in history.log.of(Kind.COMMAND_STARTED))
    return min((ns for ns in starts if ns > failure.time_ns), default=None)


def _lost_for_good(history: History, failure: Event, generation: int) -> bool:
    """Whether a command had fewer processes in a later generation than when one of them failed."""
    before, after = history.generation(failure.generation), history.generation(generation)
    if not history.info.observed or failure.data["process"] is None:
        return False
    return before is not None and after is not None and after.world < before.world


def take_ends(history: History, explained: Iterable[list[Event]], left: list[Event]) -> list[Event]:
    """Add what follows from a failure to the list of failures that holds that one.

    ``explained``: for each episode the failures that it explains; ``left``: failures that none
    explains, of which the remaining ones are returned.
    """
    for failures in explained:
        first = tuple(failures)
        failures += [end for end in left if any(follows(history, one, end) for one in first)]
        left = [failure for failure in left if failure not in failures]
    return left


# ---- when it has recovered
#
# With new steps that continue, not with the first line about a later step: a progress bar is
# redrawn during a stall, buffered lines come out when a process ends, a survivor does a step or two
# before its launcher ends it. A new step is a recovery if new steps follow it, ``STEPS`` of them at
# least and until at least ``LASTING_S`` later, before another failure (a stall is one) is seen, a
# generation starts that resumes before that step, or the job ends unfinished.
#
# Moreover, no stall may be seen while the fault still acts, neither the command nor a survivor may
# fail later for want of the process that was lost, and the job must not crawl: of the ``RATED`` new
# steps that follow (near the end, of the last ``RATED`` of all), at least one takes no more than
# ``CRAWL`` times the usual step before the failure. A job that lost ranks is slower than before,
# but not by that much, and on a busy machine too one step in so many is fast. Steps that cannot
# follow any more are not required: the next fault is injected, the job is done, or it was cut
# short. A step that was not a recovery counts as work before the failure, which is then redone.

STEPS = 3
LASTING_S = 1.0
CRAWL = 5.0
RATED = 10


def lasting(
    history: History, number: int, mark: int, *, acting_until_ns: int, ended_ns: int | None
) -> tuple[StepRun | None, int]:
    """The step that began the recovery from a failure of generation ``number``, before which
    ``mark`` was the highest step, None: there was no recovery; and the highest step before it.
    ``acting_until_ns``: until when the fault acts; ``ended_ns``: when the command or a survivor
    failed for the same reason, if it did.
    """
    later = sorted((run for run in history.runs if run.generation > number), key=_order)
    before = [run.seconds for run in history.runs if run.generation <= number]
    limit_s = CRAWL * statistics.median(before) if before else math.inf
    until = _next_fault_ns(history, min((_order(run)[0] for run in later), default=0))
    new = [run for run in later if run.step > mark and _order(run)[0] <= until]

    def crawls(run: StepRun) -> bool:
        following = new[bisect_right(new, _order(run), key=_order) :][:RATED]
        rated = following if len(following) == RATED else new[-RATED:]
        return len(new) > RATED and min(one.seconds for one in rated) > limit_s

    for run in later:
        if run.step <= mark or crawls(run):
            continue
        trouble = _trouble(history, run, later, acting_until_ns)
        if trouble is None and ended_ns is not None and _order(run)[0] < ended_ns:
            trouble = ended_ns
        if trouble is None:
            return run, mark
        mark = max(mark, *(one.step for one in later if _order(one)[0] <= trouble))
    return None, mark


def _order(run: StepRun) -> tuple[int, int]:
    return run.committed_ns or 0, run.step


def _next_fault_ns(history: History, since: int) -> int:
    """Just before the next fault's injection, or the end of the arm."""
    faults = (e.time_ns - 1 for e in history.log.of(Kind.FAULT_INJECTED) if e.time_ns >= since)
    return min(faults, default=history.end_ns)


def _trouble(
    history: History, run: StepRun, later: Sequence[StepRun], acting_until_ns: int
) -> int | None:
    """When a new step was shown not to be a recovery, ns; None: it was one."""
    since = run.committed_ns or 0
    until = _asked_until(history, run, later)
    failures = [
        event.time_ns
        for event in history.log.of(Kind.FAILURE_DETECTED)
        if since < event.time_ns <= until
        or (event.data["cause"] == "hang" and since < event.time_ns < acting_until_ns)
    ]
    back = [
        g.started_ns
        for g in history.worked
        if since < g.started_ns <= until
        and g.number > run.generation
        and (g.resume_step or 0) < run.step
    ]
    ended = [history.end_ns] if history.unfinished and until >= history.end_ns else []
    return min((*failures, *back, *ended), default=None)


def _asked_until(history: History, run: StepRun, later: Sequence[StepRun]) -> int:
    """Until when new steps have to follow this one: until enough did for long enough, or until no
    more could.
    """
    since, high, followed = run.committed_ns or 0, run.step, 0
    closed = history.end_ns
    for one in later:
        at = one.committed_ns or 0
        if at <= since or one.step <= high:
            continue
        followed, high = followed + 1, one.step
        if followed >= STEPS and at - since >= LASTING_S * NS:
            closed = at
            break
    return min(closed, _next_fault_ns(history, since), history.end_ns)


def at_the_end_again(history: History, failure: Event, high_water: int) -> int | None:
    """When a job that failed with no new step left was done again, ns: the highest step was
    repeated, or, if no step was, the restarted command ended well. None: neither happened.
    """
    started = started_again_ns(history, failure)
    if started is None or history.outcome != "completed":
        return None
    redone = [_order(run)[0] for run in history.runs if run.step >= high_water]
    ended = (e for e in history.log.of(Kind.COMMAND_ENDED) if e.data["exit_code"] == 0)
    first = min((ns for ns in redone if ns > started), default=None)
    return first or min((e.time_ns for e in ended if e.time_ns > started), default=None)


# ---- its losses

ENDED = 3
"""Norms of gradients that are no numbers, to the end, for a job to be spoilt: a scaler of losses
meets some on its way.
"""
LAST = 5
"""Last steps by which a job is judged: it is bad if most, or the very last, are not finite, and its
ranks are those that report them.
"""


def losses_of(history: History) -> dict[int, dict[int | None, list[float]]]:
    """Step -> rank (None: not given) -> losses that it reported, in the generation whose run of the
    step survived.
    """
    lineage = history.lineage
    found: dict[int, dict[int | None, list[float]]] = defaultdict(lambda: defaultdict(list))
    for event in history.reports:
        run = lineage.get(event.step or 0)
        told = event.data["loss"] is not None
        if told and run is not None and run.generation == event.generation:
            found[run.step][event.data["rank"]].append(float(event.data["loss"]))
    return {step: dict(found[step]) for step in sorted(found)}


def losses_before(history: History, step: int, rank: int | None) -> list[float]:
    """Losses that a rank reported for a step in generations before the one whose run survived."""
    run = history.lineage.get(step)
    return [
        float(event.data["loss"])
        for event in history.reports
        if run is not None
        and (event.step, event.data["rank"]) == (step, rank)
        and event.generation < run.generation
        and event.data["loss"] is not None
    ]


def unread_of(history: History, since: int = 0) -> Mapping[str, tuple[int, str]]:
    """Name (``loss``, ``rank``, ``samples``) -> how many values reported for it could not be read,
    and the first, in reports of step ``since`` and later ones.
    """
    found: dict[str, list[str]] = defaultdict(list)
    for event in history.reports:
        for name, text in (event.data.get("unread") or {}).items():
            if (event.step or 0) >= since:
                found[name].append(str(text))
    return {name: (len(texts), texts[0]) for name, texts in found.items()}


def spoilt_since(history: History) -> int | None:
    """The step from which the job reported non-finite losses to its end; None: it ended on finite
    losses, or reported none.
    """
    losses = losses_of(history)
    finite = {
        step: all(map(math.isfinite, itertools.chain.from_iterable(by_rank.values())))
        for step, by_rank in losses.items()
    }
    bad = [step for step, fine in finite.items() if not fine]
    last = [*losses][-LAST:]
    if not bad or (last[-1] not in bad and 2 * len(set(bad) & set(last)) <= len(last)):
        return None
    good = max((step for step, fine in finite.items() if fine and step < bad[-1]), default=0)
    return min((step for step in bad if step > good), default=bad[-1])


def gradients_spoilt_since(history: History) -> int | None:
    """The step from which on, to the end, the reported norms of gradients are no numbers, ENDED of
    them at least; None: not so. How far apart they are shows which reports tell of gradients: those
    of a bar need not.
    """
    reports = history.reports
    bad = sorted({event.step or 0 for event in reports if event.data.get("spoilt")})
    apart = [after - before for before, after in itertools.pairwise(bad)]
    last = max((event.step or 0 for event in reports), default=0)
    if len(bad) < ENDED or last - bad[-1] > statistics.median(apart):
        return None
    usual = statistics.median(apart)
    return bad[max((place for place, gap in enumerate(apart, start=1) if gap > usual), default=0)]


def is_bad(event: Event) -> bool:
    """Whether a report's loss is not finite."""
    return event.data["loss"] is not None and not math.isfinite(float(event.data["loss"]))


# ---- its ranks at the end


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
    lacks = history.info.observed and history.generations and found != ranks
    return f"{found} of {ranks} ranks were found" if lacks else ""


def strength_of(history: History) -> Strength:
    """Strength of a command's arm. One without reports ends as it started.

    If every rank makes its own reports, they decide: a rank that reports none of the last steps no
    longer takes part, whatever happened to its process. Otherwise the members of the last
    generation count, except those that had ended, or were stopped by a fault, before the last
    steps.
    """
    began, reports, exits = history.found, history.reports, history.exited_ns
    number = max((run.generation for run in history.runs), default=0)
    mine = [event for event in reports if event.generation == number]
    steps = sorted({event.step or 0 for event in mine})[-LAST:]
    last = [event for event in mine if (event.step or 0) in steps]
    if not last or not history.worked:
        return Strength(began=began, ended=began, gone={})
    first = {e.data["rank"] for e in reports if e.generation == history.generations[0].number}
    if len(first) >= began and all(event.data["rank"] is not None for event in reports):
        there = {event.data["rank"] for event in last}
        missed = _missed_since(reports)
        gone = {f"rank {rank}": at for rank, at in missed.items() if rank not in there}
        return Strength(began=began, ended=len(there), gone=gone if len(there) < began else {})
    members = history.worked[-1].members
    since, until = min(e.time_ns for e in last), max(e.time_ns for e in last)
    away = {name: at for name, at in exits.items() if at < since}
    away |= {name: at for name, at, end in stops(history.log) if at < since and end > until}
    gone = {name: away[name] for name in members if name in away}
    replaced = set(history.worked[-2].members) - {*members} if len(history.worked) > 1 else set()
    before = {name: at for name, at in exits.items() if name in replaced}
    return Strength(began=began, ended=len(members) - len(gone), gone=gone or before)


def _missed_since(reports: Sequence[Event]) -> dict[int, int]:
    """Rank -> when another rank was first two reports beyond its last; else the time of its last
    report.
    """
    steps = sorted({event.step or 0 for event in reports})
    missed = {}
    for rank, own in {int(event.data["rank"]): event for event in reports}.items():
        beyond = [step for step in steps if step > (own.step or 0)][1:2]
        late = (e.time_ns for e in reports if beyond and (e.step or 0) >= beyond[0])
        missed[rank] = min((ns for ns in late if ns > own.time_ns), default=own.time_ns)
    return missed
