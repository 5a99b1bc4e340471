"""How much of an arm's low rate is due to a machine short of processor time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.judge.evidence.evidence import Evidence
from trainchaos.harness.judge.measure.partition import Ideal
from trainchaos.harness.judge.measure.pressure import (
    LIMIT,
    ExtraCpuWait,
    Pressure,
    excuse,
    others_of,
    pressures_of,
)
from trainchaos.harness.judge.record.history import History, StepRun

STARVED = 2.0
"""Seconds in a queue per second of running, above which a rank had less than a third of the
processor time that it wanted: the wait of a step is then several times its work, and varies so.
"""
NO_STEP_S = 1e-9
LIKE = 1.5
"""Largest ratio of a step to the median one at which it is similar. Waits in longer steps say
nothing about the median: a rank that got no processor for seconds made one step long, and no other.
"""


@dataclass(frozen=True, kw_only=True)
class NetStepTime:
    """A step without its waits for processors, in seconds: most likely, and at least. ``may_pass``:
    the likely wait is within what a verdict may subtract; ``starved``: the ranks waited so long for
    processors that what is left varies much; ``why``: message.
    """

    likely_s: float
    least_s: float
    may_pass: bool
    starved: bool
    why: str


def net_of_pressure(
    evidence: Evidence, ideal: Ideal, step_s: float, tail: Sequence[StepRun]
) -> NetStepTime | None:
    """The steps ``tail``, which take ``step_s``, net of pressure. None if there are no readings:
    then nothing is subtracted.
    """
    ideal_s = ideal.step_s
    ideals = _over(ideal.history, ideal.runs, ideal_s)
    nows = _over(evidence.history, tail, step_s)
    # a step takes as long as on the node that is worst off
    pairs = {node: (ideals[node], nows[node]) for node in sorted(ideals.keys() & nows.keys())}
    excuses = {node: excuse(ideal_s, step_s, *pair) for node, pair in pairs.items()}
    worst = max(
        excuses, key=lambda node: (excuses[node].most_s, excuses[node].likely_s), default=None
    )
    if worst is None or excuses[worst].most_s <= 0:
        return None
    found, (before, now) = excuses[worst], pairs[worst]
    return NetStepTime(
        likely_s=max(NO_STEP_S, step_s - found.likely_s),
        least_s=max(NO_STEP_S, step_s - found.most_s),
        may_pass=found.likely_s <= LIMIT * step_s,
        starved=now.wait > STARVED,
        why=_message(before, now, found, step_s),
    )


def says_little(evidence: Evidence, net: NetStepTime | None) -> bool:
    """Whether other programs used much of the machine, and how long the ranks waited is unknown, or
    was several times their work: one step then differs much from the next.
    """
    return (net is None or net.starved) and others_of(evidence.log) is not None


def unrecorded(evidence: Evidence) -> str:
    """Remark for a finding when it is unknown how busy the machine was: the kernel did not report
    it, or the log is old.
    """
    known = evidence.log.first(Kind.PRESSURE_READ) is not None
    return "" if known else "; how busy its machines were is not recorded"


def _over(history: History, runs: Sequence[StepRun], median_s: float) -> dict[int, Pressure]:
    """Pressure over the steps similar to the median one; over all steps if too little was read in
    those.
    """
    like = [run for run in runs if run.seconds <= LIKE * median_s] or runs
    start_ns, end_ns = min(run.start_ns for run in like), max(run.end_ns for run in like)
    others = [(run.start_ns, run.end_ns) for run in runs if run.seconds > LIKE * median_s]
    found = pressures_of(history.log, start_ns, end_ns, others)
    return found or pressures_of(history.log, start_ns, end_ns)


def _message(ideal: Pressure, now: Pressure, found: ExtraCpuWait, step_s: float) -> str:
    stolen = (
        f", and {100 * now.steal:.0f} % of the processors were stolen" if now.steal > 0.01 else ""
    )
    return (
        f"its ranks stood in a run queue for {now.wait:.1f} s for each second that they ran, and"
        f" not for {ideal.wait:.1f} s{stolen}, which is {100 * found.likely_s / step_s:.0f} % of a"
        " step"
    )
