"""What of an arm's rate its machine is to blame for, which had too little processor time for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chaos.events.log import Kind
from harness.judge.evidence.evidence import Evidence
from harness.judge.measure.pressure import LIMIT, Excuse, Pressure, excuse, pressures_of
from harness.judge.record.history import History, StepRun

NO_STEP_S = 1e-9
LIKE = 1.5
"""Times a step may take what the median one does, and is like it. What is waited for in the others
says nothing of how long the median one is: a rank that got no processor for seconds made one step
long, and no other.
"""


@dataclass(frozen=True, kw_only=True)
class Net:
    """A step without what was waited for processors, seconds: most likely, and at least.
    ``may_pass``: that is no more than may be taken off for a verdict; ``why``: in words.
    """

    likely_s: float
    least_s: float
    may_pass: bool
    why: str


def net_of_pressure(
    evidence: Evidence, ideal_s: float, step_s: float, tail: Sequence[StepRun]
) -> Net | None:
    """Of the steps ``tail``, that take ``step_s``; None where nothing was read, what was read
    cannot be true, or what it is compared with is not known: then nothing is taken off.
    """
    compared = _compared(evidence, ideal_s)
    if compared is None or not tail:
        return None
    ideals, nows = _over(*compared, ideal_s), _over(evidence.history, tail, step_s)
    if any(one.odd for one in (*ideals.values(), *nows.values())):
        return None
    # a step takes as long as it does on the node that is worst off
    pairs = {node: (ideals[node], nows[node]) for node in sorted(ideals.keys() & nows.keys())}
    excuses = {node: excuse(ideal_s, step_s, *pair) for node, pair in pairs.items()}
    worst = max(
        excuses, key=lambda node: (excuses[node].most_s, excuses[node].likely_s), default=None
    )
    if worst is None or excuses[worst].most_s <= 0:
        return None
    found, (ideal, now) = excuses[worst], pairs[worst]
    return Net(
        likely_s=max(NO_STEP_S, step_s - found.likely_s),
        least_s=max(NO_STEP_S, step_s - found.most_s),
        may_pass=found.likely_s <= LIMIT * step_s,
        why=_why(ideal, now, found, step_s),
    )


def unrecorded(evidence: Evidence) -> str:
    """What has to be said where nobody knows how busy the machine was: the kernel did not say, or
    the log is old.
    """
    known = evidence.log.first(Kind.PRESSURE_READ) is not None
    return "" if known else "; how busy its machines were is not recorded"


def _compared(evidence: Evidence, ideal_s: float) -> tuple[History, list[StepRun]] | None:
    """The steps like the ideal one, which is the median of an arm; see
    ``harness.judge.measure.partition.ideal_of``.
    """
    source = evidence.control_history or evidence.history
    injected = [e.injected.time_ns for e in evidence.measures.episodes if e.injected]
    until = min(injected) if injected and evidence.control_history is None else None
    runs = [
        run
        for run in source.lineage.values()
        if run.world == source.info.ranks and (until is None or run.end_ns < until)
    ]
    return (source, runs) if runs else None


def _over(history: History, runs: Sequence[StepRun], median_s: float) -> dict[int, Pressure]:
    """Of those of the steps that are like the median one; of all of them where too little was read
    of these.
    """
    like = [run for run in runs if run.seconds <= LIKE * median_s] or runs
    start_ns, end_ns = min(run.start_ns for run in like), max(run.end_ns for run in like)
    others = [(run.start_ns, run.end_ns) for run in runs if run.seconds > LIKE * median_s]
    found = pressures_of(history.log, start_ns, end_ns, others)
    return found or pressures_of(history.log, start_ns, end_ns)


def _why(ideal: Pressure, now: Pressure, found: Excuse, step_s: float) -> str:
    stolen = (
        f", and {100 * now.steal:.0f} % of the processors were stolen" if now.steal > 0.01 else ""
    )
    return (
        f"its ranks stood in a run queue for {now.wait:.1f} s for each second that they ran, and"
        f" not for {ideal.wait:.1f} s{stolen}, which is {100 * found.likely_s / step_s:.0f} % of a"
        " step"
    )
