"""Steps that a command left out when it went on after a failure: nobody reported them.

Reports show it where the control arm has them and the distance is larger than any between two of
its reports. One may be missing: of a step that was saved, and whose process was killed before it
reported it. Lines of output may be lost in the buffer of a killed process as well; reports of the
beacon are not, so that steps which none of its ranks reported were not trained.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence
from trainchaos.harness.judge.record.history import Generation, History
from trainchaos.harness.judge.record.observed import stride_of

UNREPORTED = 1  # reports that a process may owe when it is killed


@dataclass(frozen=True, kw_only=True)
class Jump:
    """``sure``: the steps were not trained; otherwise their reports may be lost."""

    words: str
    sure: bool


def jump_of(evidence: Evidence) -> Jump | None:
    """The first jump of a faulted arm, None if there is none."""
    control, history = evidence.control_history, evidence.history
    if control is None or evidence.is_control:
        return None
    known, said = _steps(control), _steps(history)
    stride = stride_of(history)
    usual = max([stride, *(after - before for before, after in itertools.pairwise(known))])
    for before, after in itertools.pairwise(history.generations):
        if after.resume_step is None:
            continue
        earlier = [e.step or 0 for e in _reports(history) if e.generation < after.number]
        high = max(earlier, default=0)
        first = after.resume_step + stride
        missing = [step for step in known if high < step < first and step not in said]
        if high and first - high > usual and len(missing) > UNREPORTED:
            return _jump(history, before, after, first, missing)
    return None


def _jump(
    history: History, before: Generation, after: Generation, first: int, missing: list[int]
) -> Jump:
    low, high = missing[0], missing[-1]
    of = "each" if len(missing) == high - low + 1 else f"{len(missing)} of them"
    when = "the restart" if after.cause == "restart" else "the failure"
    if _all_heard(history, before):
        return Jump(
            words=f"steps {low} to {high} were left out: the job went on with step {first} after"
            f" {when}, the beacon reported none of them, and the control arm reports {of}",
            sure=True,
        )
    return Jump(
        words=f"steps {low} to {high} were reported by nobody: the job went on with step {first}"
        f" after {when}, and the control arm reports {of}: were they trained, or their lines lost?",
        sure=False,
    )


def _all_heard(history: History, generation: Generation) -> bool:
    """Whether no rank of a generation can have trained on unheard: each reported by the beacon, or
    those that did were not lost.
    """
    if history.finished is not None and history.finished.data.get("refused"):
        return False
    mine = [e for e in _reports(history) if e.generation == generation.number]
    if not all(event.data["source"] == "beacon" for event in mine):
        return False
    ranks = {event.data["rank"] for event in mine}
    lost = {
        event.data["rank"]
        for event in history.log.of(Kind.FAILURE_DETECTED)
        if event.generation == generation.number
    }
    if generation.world == 1:
        return True
    apart = None not in ranks | lost and ranks.isdisjoint(lost)
    return apart or (None not in ranks and len(ranks) == generation.world)


def _steps(history: History) -> list[int]:
    return sorted({event.step or 0 for event in _reports(history)})


def _reports(history: History) -> list[Event]:
    return list(history.log.of(Kind.STEP_REPORTED))
