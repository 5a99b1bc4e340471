"""The reasons for which a verdict other than pass is no defect, each with what must be true of the
scenario for it to count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.fault.base import Fault
from trainchaos.harness.fuzz.draw.draw import TRIGGERS
from trainchaos.harness.fuzz.play import unlanded
from trainchaos.harness.fuzz.play.play import kinds
from trainchaos.harness.fuzz.play.uncompared import uncompared
from trainchaos.harness.fuzz.play.unlanded import Case, occurrence
from trainchaos.harness.inject.occurrences import ENDED_BEFORE
from trainchaos.harness.judge.measure.pressure import TOO_BUSY
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.recovery.detection.hangs import STALLS, HangLimits
from trainchaos.recovery.detection.pace import WINDOW

TRUSTED = 4
"""Samples of the smallest batch whose gradient is expected to train."""
CUTS = frozenset(("node-isolate", "partition", "link-flap"))
SILENT = re.compile(r"silent for ([\d.]+) s")
AFTER_STEP = re.compile(r"differ from the control arm's after step (\d+)")


@dataclass(frozen=True)
class Excuse:
    """A reason that excuses a verdict of a checker other than pass. ``says``: regular expressions
    of texts in its witness; ``when``: conditions of which one must hold, none: always; ``whole``:
    it explains the checker's whole witness, not only the part that contains it.
    """

    checker: str
    verdict: str
    says: tuple[str, ...]
    when: tuple[Callable[[Case], bool], ...] = ()
    whole: bool = False

    def explains(self, text: str, case: Case) -> bool:
        """Whether it is the reason for a witness, or a part of one."""
        said = any(re.search(pattern, text) for pattern in self.says)
        return said and (not self.when or any(map(case.holds, self.when)))


def _insists(case: Case) -> bool:
    """Whether faults strike so often that the same step may fail repeatedly."""
    faults, once = case.tree["faults"], ({"step"}, {"time"}, {"event"})
    again = any(f.get("retrigger") or f["at"].keys() & TRIGGERS not in once for f in faults)
    return again or "crash-loop" in case.kinds or len(faults) > 1


def _unrecovered(case: Case) -> bool:
    """Whether the job must end at its first failure."""
    return bool(case.tree["recovery"]["strategy"] == "none")


def _no_node_left(case: Case) -> bool:
    """Whether a fault took the last node, and nothing starts another."""
    lost = {e.data["node"] for e in case.log.of(Kind.NODE_LOST)}
    return len(lost) >= case.tree["launcher"].get("nodes", 1)


def _never_agreed(case: Case) -> bool:
    """Whether a fault made replicas differ before they had agreed on any state in a checkpoint:
    then it is unknown which of two is right, and there is no state to return to.
    """
    log = case.log
    if not any(kinds()[kind].changes_state for kind in case.kinds):
        return False
    differ = [e for e in log.of(Kind.FAILURE_DETECTED) if e.data["cause"] == "diverged"]
    named = bool(differ) and differ[-1].data["process"] is not None
    if not differ or (
        named and case.tree["recovery"]["strategy"] != "checkpoint-restart"
    ):  # this strategy keeps no rank's state
        return False
    agreed = max((e.step or 0 for e in log.of(Kind.REPLICAS_AGREED)), default=-1)
    return not any((e.step or 0) <= agreed for e in log.of(Kind.CHECKPOINT_COMMITTED))


def _left_spoilt(case: Case) -> bool:
    """Whether the job may end with a state known to be wrong, since its strategy repairs
    nothing.
    """
    gave_up = case.played.outcomes.get("faulted") == "gave-up"
    return gave_up and _unrecovered(case) and "tensor-corrupt" in case.kinds


def _silent(case: Case) -> bool:
    """Whether a fault makes values wrong that stay finite, so that they cannot be recognized."""
    return any(_spoils_finite(kinds()[f["kind"]], f.get("params", {})) for f in case.tree["faults"])


def _spoils_finite(kind: type[Fault], params: Mapping[str, Any]) -> bool:
    """What is spoilt everywhere is not finite: it is refused whichever rank computes it."""
    op = kind.model_fields.get("op")
    written = params.get("op", op.default if op else "")
    return kind.corrupts and not kind.everywhere and written not in ("nan", "inf")


def _uncompared(case: Case) -> bool:
    """Whether replicas differ because of a fault, and no comparison was due."""
    return uncompared(case.tree, case.log)


def _lost_uncompared(case: Case) -> bool:
    """Whether the first state unlike the control arm's is of a step after which replicas differed
    because of a fault, and no comparison was due: one that is not finite, and whose holder was lost
    before the step that would have refused it.
    """
    finding = case.played.findings.get("faulted: loss-equality")
    after = AFTER_STEP.search(finding.witness) if finding else None
    return after is not None and uncompared(case.tree, case.log, int(after[1]))


def _cut_off(case: Case) -> bool:
    """Whether ranks are cut off from each other for a number of steps, which are not made
    meanwhile.
    """
    faults = case.tree["faults"]
    return any(f["kind"] in CUTS and isinstance(f.get("duration"), dict) for f in faults)


def _common_stall(case: Case) -> bool:
    """Whether half of the last generation or more was hit as it waited for data, and none of them
    was heard of again, or what it made known was hidden from then on. To their supervisor the
    source of the data is slow, which it takes for a hang after ``between_s`` only; the job is to be
    halted before that.
    """
    log = case.log
    started = list(log.of(Kind.GENERATION_STARTED))
    if not started or not any(limit_s < HangLimits().between_s for limit_s in case.limits_s):
        return False
    number, members = started[-1].generation, set(started[-1].data["members"])
    last_ns = {
        name: max((e.time_ns for e in log.by(name) if e.kind is not Kind.FAULT_EFFECT), default=0)
        for name in members
    }
    unseen = _hidden_for_good(case)
    still = set()
    for hit in log.of(Kind.FAULT_INJECTED):
        name = (hit.data["target"] or {}).get("process")
        unheard = last_ns.get(name, 0) <= hit.time_ns or occurrence(hit) in unseen
        if unheard and hit.generation == number and hit.data.get("phase") == STALLS:
            still.add(name)
    return 2 * len(still & members) >= len(members)


def _hidden_for_good(case: Case) -> set[tuple[str, int]]:
    """Faults, with their occurrences, that hid a rank's progress and did not end before the last
    step of the job.
    """
    log, hiding = case.log, _hiding(case)
    last_ns = max((e.time_ns for e in log.of(Kind.STEP_COMMITTED)), default=0)
    over = {occurrence(e) for e in log.of(Kind.FAULT_HEALED) if e.time_ns <= last_ns}
    hits = (e for e in log.of(Kind.FAULT_INJECTED) if e.data["fault"] in hiding)
    return {occurrence(e) for e in hits} - over


def _hiding(case: Case) -> set[str]:
    return {fault["id"] for fault in case.tree["faults"] if fault["kind"] == "heartbeat-drop"}


def _slow_to_start(case: Case) -> bool:
    """Whether the supervisor, or the one that adopted the job, saw no step made and spent half of
    the job's time limit on hangs; before the first step it cannot know how long a normal wait is.
    """
    if any(e.time_ns > case.began_ns for e in case.log.of(Kind.STEP_COMMITTED)):
        return False
    silent = (SILENT.search(e.data["detail"]) for e in case.log.of(Kind.FAILURE_DETECTED))
    waited_s = sum(float(hang[1]) for hang in silent if hang)
    return any(waited_s >= limit_s / 2 for limit_s in case.limits_s)


def _may_compile(case: Case) -> bool:
    """Whether ranks that a fault only slows down had done one step at most, and the job's
    time limit is less than a rank may compile for.
    """
    commits = case.log.of(Kind.STEP_COMMITTED)
    done = {e.step for e in commits if e.time_ns > case.began_ns}
    slowed = any(kinds()[kind].harmless and kinds()[kind].lasting for kind in case.kinds)
    soon = any(limit_s < HangLimits().compile_s for limit_s in case.limits_s)
    return slowed and soon and len(done) <= 1


def _taught_patience(case: Case) -> bool:
    """Whether most steps that the supervisor saw took so long, for a fault that held a rank, that
    the usual multiple of them is more than the job's time limit.
    """
    injected = [e.time_ns for e in case.log.of(Kind.FAULT_INJECTED)]
    runs = history_of(case.log).runs
    lately = [run for run in runs if run.committed_ns and run.start_ns >= case.began_ns][-WINDOW:]
    held = any(run.start_ns <= at <= run.end_ns for run in lately for at in injected)
    patience_s = HangLimits().factor * median([run.seconds for run in lately] or [0.0])
    return held and any(patience_s >= limit_s for limit_s in case.limits_s)


def _hidden(case: Case) -> bool:
    """Whether a fault that landed hid a rank's progress from its supervisor."""
    return any(fault in _hiding(case) for fault, _ in case.landed)


def _never_began(case: Case) -> bool:
    return case.played.outcomes.get("faulted") != "completed"


def _tiny_batches(case: Case) -> bool:
    """Whether a smaller world took batches of fewer samples than a gradient can be trusted with:
    real training may diverge then.
    """
    taken = (e.data["samples"] for e in case.log.of(Kind.STEP_COMMITTED))
    shrinks = case.tree["recovery"].get("batch") == "shrink"
    return shrinks and _real(case) and min(taken, default=TRUSTED) < TRUSTED


def _real(case: Case) -> bool:
    """Whether real processes trained, on a machine with other load."""
    return bool(case.tree["launcher"]["kind"] != "sim")


NEVER_DUE = (
    r"waited for \w+ number \d+, which never came",
    r"was due at step \d+, the run ended at \d+",
    r"was first due [\d.]+ s after the first step, and training lasted",
    r"its probability ruled out every arrival",
    r"was due [\d.]+ s after the first step, the run took",
    r"was due at step \d+, and no rank that it was for came there",
    "no fault fired: their probabilities ruled all of them out",
)
"""Reasons why a fault was never injected."""
NOT_LANDED = (
    "could not be injected: it was over before an effect was seen",
    "could not be injected: the run ended before an effect was seen",
    "could not be injected: no process holds rank",
    "could not be injected: the process was gone",
    r"could not be injected: no spare \d+ waits",
    "could not be injected: no such checkpoint",
    "not fired: what it acts on was not there when it was due",
    "not fired: ranks held for it where it was planned, and their generation was lost",
    "^use another seed$",
)
"""Reasons why an injected fault did nothing."""
HIDDEN_STEP = r"was due at step \d+, the supervisor saw the end of step \d+ as the last"
UNSEEN = "could not be injected: no evidence within"
COULD_NOT = "could not be injected: it could not act: "
NO_DEVICE = f"{COULD_NOT}RuntimeError: .* is the last device"
NO_OTHER_FILE = f"{COULD_NOT}FileNotFoundError: there is no other data file"
NOTHING_LEFT = f"{COULD_NOT}FileNotFoundError: no data is left in it"
NOBODY_THERE = r"could not be injected: no process is on node \d+"
ENDED = f"could not be injected: {ENDED_BEFORE}"
SLIGHT = (
    *(unlanded.slight, unlanded.brief, unlanded.names_a_sample, unlanded.displaced),
    *(unlanded.thrown_away, unlanded.stopped_before, unlanded.left_out_before),
)
"""Conditions for which an effect may not show."""
TOO_SHORT = (
    r"\d+ healthy steps? after the last fault, \d+ are needed",
    "too short to tell: raise workload.steps",
)
TOO_NOISY = (
    f"^{TOO_BUSY}",
    "of its own before the first fault: run it on a quieter machine$",
    "in all, too short to tell: raise workload.steps$",
)
"""Reasons why the speed of a job of milliseconds on a shared machine cannot be judged."""
GAVE_UP, HALTED = (f"the job did not finish: {how}" for how in ("gave-up", "halted"))
NO_STEP = "no committed step|no step was committed"
FEW_DIGESTS = (
    "no step has digests from two ranks",
    r"\d+ of \d+ ranks left a digest of the last step",
)
LANDED, LOSS, REPLICAS = "fault-landed", "loss-equality", "replica-equality"
OPEN, FAIL = "inconclusive", "fail"
EXCUSES: tuple[Excuse, ...] = (
    Excuse(LANDED, OPEN, (*NEVER_DUE, *NOT_LANDED)),
    Excuse(LANDED, OPEN, (HIDDEN_STEP,), (_hidden,)),
    Excuse(LANDED, OPEN, (UNSEEN,), SLIGHT),
    Excuse(LANDED, OPEN, (ENDED,), (unlanded.ended_otherwise,)),
    Excuse(LANDED, OPEN, (NO_DEVICE,), (unlanded.lost_devices,)),
    Excuse(LANDED, OPEN, (NO_OTHER_FILE,), (unlanded.swaps,)),
    Excuse(LANDED, OPEN, (NOTHING_LEFT,), (unlanded.emptied,)),
    Excuse(LANDED, OPEN, (NOBODY_THERE,), (unlanded.without_ranks, unlanded.all_gone)),
    Excuse("liveness", OPEN, TOO_SHORT),
    Excuse("liveness", OPEN, TOO_NOISY, (_real,), whole=True),
    Excuse("liveness", FAIL, (GAVE_UP,), (_insists, _unrecovered, _never_agreed, _no_node_left)),
    Excuse("liveness", FAIL, (HALTED,), (_cut_off, _common_stall, _slow_to_start)),
    Excuse("liveness", FAIL, (HALTED,), (_may_compile, _taught_patience)),
    Excuse(LOSS, OPEN, ("common steps are too few to smooth over",)),
    Excuse(LOSS, OPEN, (NO_STEP,), (_never_began,)),
    Excuse("nan-containment", OPEN, (NO_STEP,), (_never_began,)),
    Excuse("sample-accounting", OPEN, (NO_STEP,), (_never_began,)),
    Excuse("step-arithmetic", OPEN, (NO_STEP,), (_never_began,)),
    Excuse(LOSS, FAIL, ("parameters differ",), (_left_spoilt,)),
    Excuse(LOSS, FAIL, ("",), (_silent,)),
    Excuse(LOSS, FAIL, (AFTER_STEP.pattern,), (_lost_uncompared,)),
    Excuse(LOSS, FAIL, ("^too bad",), (_tiny_batches,), whole=True),
    Excuse(REPLICAS, OPEN, FEW_DIGESTS),
    Excuse(REPLICAS, FAIL, ("ranks hold different",), (_uncompared,)),
)
