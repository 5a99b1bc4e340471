"""The reasons for which a verdict other than pass is no defect, each with what must be true of the
scenario for it to count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainchaos.chaos.events.log import Kind, Log
from trainchaos.chaos.fault.base import Fault
from trainchaos.harness.fuzz.play import unlanded
from trainchaos.harness.fuzz.play.play import PlayResult, kinds
from trainchaos.harness.fuzz.play.uncompared import uncompared
from trainchaos.harness.fuzz.play.unlanded import Tree, faulted_log
from trainchaos.harness.inject.occurrences import ENDED_BEFORE
from trainchaos.harness.judge.measure.pressure import TOO_BUSY
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.recovery.detection.hangs import STALLS, HangLimits
from trainchaos.recovery.detection.pace import WINDOW

TRUSTED = 4
"""Samples of the smallest batch whose gradient is expected to train."""
TRIGGERS = frozenset(("step", "steps", "from", "time", "event", "mtbf", "weibull"))
"""Keys of a fault's ``at``; each has one of them."""
SILENT = re.compile(r"silent for ([\d.]+) s")
AFTER_STEP = re.compile(r"differ from the control arm's after step (\d+)")
SECONDS = re.compile(r"no_committed_step_for > ([\d.]+)s")


@dataclass(frozen=True, kw_only=True)
class Excuse:
    """A reason that excuses a verdict other than pass. ``name``: of the checker, ``says``: text in
    its witness, both regular expressions; ``when``: scenarios for which it can be true; ``whole``:
    it explains the checker's whole witness, not only the part that contains it.
    """

    name: str
    verdict: str
    says: str
    when: Callable[[Tree, PlayResult], bool] = lambda tree, played: True
    whole: bool = False


def _kinds(tree: Tree) -> set[str]:
    return {fault["kind"] for fault in tree["faults"]}


def _insists(tree: Tree, played: PlayResult) -> bool:
    """Whether faults strike so often that the same step may fail repeatedly."""
    once = ({"step"}, {"time"}, {"event"})
    again = any(f.get("retrigger") or f["at"].keys() & TRIGGERS not in once for f in tree["faults"])
    return again or "crash-loop" in _kinds(tree) or len(tree["faults"]) > 1


def _unrecovered(tree: Tree, played: PlayResult) -> bool:
    """Whether the job must end at its first failure."""
    return tree["recovery"]["strategy"] == "none"


def _no_node_left(tree: Tree, played: PlayResult) -> bool:
    """Whether a fault took the last node, and nothing starts another."""
    log = faulted_log(played)
    lost = {e.data["node"] for e in log.of(Kind.NODE_LOST)} if log is not None else set()
    return len(lost) >= tree["launcher"].get("nodes", 1)


def _never_agreed(tree: Tree, played: PlayResult) -> bool:
    """Whether a fault made replicas differ before they had agreed on any state in a checkpoint:
    then it is unknown which of two is right, and there is no state to return to.
    """
    log = faulted_log(played)
    if log is None or not any(kinds()[kind].changes_state for kind in _kinds(tree)):
        return False
    differ = [e for e in log.of(Kind.FAILURE_DETECTED) if e.data["cause"] == "diverged"]
    named = bool(differ) and differ[-1].data["process"] is not None
    if not differ or (
        named and tree["recovery"]["strategy"] != "checkpoint-restart"
    ):  # this strategy keeps no rank's state
        return False
    agreed = max((e.step or 0 for e in log.of(Kind.REPLICAS_AGREED)), default=-1)
    return not any((e.step or 0) <= agreed for e in log.of(Kind.CHECKPOINT_COMMITTED))


def _left_spoilt(tree: Tree, played: PlayResult) -> bool:
    """Whether the job may end with a state known to be wrong, since its strategy repairs
    nothing.
    """
    gave_up = played.outcomes.get("faulted") == "gave-up"
    return gave_up and _unrecovered(tree, played) and "tensor-corrupt" in _kinds(tree)


def _silent(tree: Tree, played: PlayResult) -> bool:
    """Whether a fault makes values wrong that stay finite, so that they cannot be recognized."""
    return any(_spoils_finite(kinds()[f["kind"]], f.get("params", {})) for f in tree["faults"])


def _spoils_finite(kind: type[Fault], params: Mapping[str, Any]) -> bool:
    """What is spoilt everywhere is not finite: it is refused whichever rank computes it."""
    op = kind.model_fields.get("op")
    written = params.get("op", op.default if op else "")
    return kind.corrupts and not kind.everywhere and written not in ("nan", "inf")


def _uncompared(tree: Tree, played: PlayResult) -> bool:
    """Whether replicas differ because of a fault, and no comparison was due."""
    log = faulted_log(played)
    return log is not None and uncompared(tree, log)


def _lost_uncompared(tree: Tree, played: PlayResult) -> bool:
    """Whether the first state unlike the control arm's is of a step after which replicas differed
    because of a fault, and no comparison was due: one that is not finite, and whose holder was lost
    before the step that would have refused it.
    """
    log, finding = faulted_log(played), played.findings.get("faulted: loss-equality")
    found = AFTER_STEP.search(finding.witness) if finding else None
    return log is not None and found is not None and uncompared(tree, log, int(found[1]))


def _cut_off(tree: Tree, played: PlayResult) -> bool:
    """Whether ranks are cut off from each other for a number of steps, which are not made
    meanwhile.
    """
    cuts = ("node-isolate", "partition", "link-flap")
    return any(f["kind"] in cuts and isinstance(f.get("duration"), dict) for f in tree["faults"])


def _common_stall(tree: Tree, played: PlayResult) -> bool:
    """Whether half of the last generation or more was hit as it waited for data, and none of them
    was heard of again, or what it made known was hidden from then on. To their supervisor the
    source of the data is slow, which it takes for a hang after ``between_s`` only; the job is to be
    halted before that.
    """
    log = faulted_log(played)
    started = list(log.of(Kind.GENERATION_STARTED)) if log else []
    if log is None or not started:
        return False
    number, members = started[-1].generation, set(started[-1].data["members"])
    last_ns = {
        name: max(e.time_ns for e in log.by(name) if e.kind is not Kind.FAULT_EFFECT)
        for name in members
        if any(log.by(name))
    }
    unseen = _hidden_for_good(tree, log)
    still = {
        (e.data["target"] or {}).get("process")
        for e in log.of(Kind.FAULT_INJECTED)
        if e.generation == number
        and e.data.get("phase") == STALLS
        and (
            last_ns.get((e.data["target"] or {}).get("process"), 0) <= e.time_ns
            or (e.data["fault"], e.data["occurrence"]) in unseen
        )
    }
    limits = [SECONDS.search(str(rule["when"])) for rule in tree["stop_conditions"]]
    soon = any(limit and float(limit[1]) < HangLimits().between_s for limit in limits)
    return soon and 2 * len(still & members) >= len(members)


def _hidden_for_good(tree: Tree, log: Log) -> set[tuple[str, int]]:
    """Faults, with their occurrences, that hid a rank's progress and did not end before the last
    step of the job.
    """
    last_ns = max((e.time_ns for e in log.of(Kind.STEP_COMMITTED)), default=0)
    over = {
        (e.data["fault"], e.data["occurrence"])
        for e in log.of(Kind.FAULT_HEALED)
        if e.time_ns <= last_ns
    }
    hiding = _hiding(tree)
    injected = [e.data for e in log.of(Kind.FAULT_INJECTED) if e.data["fault"] in hiding]
    return {(data["fault"], data["occurrence"]) for data in injected} - over


def _hiding(tree: Tree) -> set[str]:
    return {fault["id"] for fault in tree["faults"] if fault["kind"] == "heartbeat-drop"}


def _slow_to_start(tree: Tree, played: PlayResult) -> bool:
    """Whether the supervisor, or the one that adopted the job, saw no step made and spent half of
    the job's time limit on hangs; before the first step it cannot know how long a normal wait is.
    """
    log = faulted_log(played)
    if log is None:
        return False
    began_ns = max((e.time_ns for e in log.of(Kind.COORDINATOR_ADOPTED)), default=0)
    if any(e.time_ns > began_ns for e in log.of(Kind.STEP_COMMITTED)):
        return False
    limits = [SECONDS.search(str(rule["when"])) for rule in tree["stop_conditions"]]
    silent = (SILENT.search(e.data["detail"]) for e in log.of(Kind.FAILURE_DETECTED))
    waited = sum(float(found[1]) for found in silent if found)
    return any(limit and waited >= float(limit[1]) / 2 for limit in limits)


def _may_compile(tree: Tree, played: PlayResult) -> bool:
    """Whether ranks that a fault only slows down had done one step at most, and the job's
    time limit is less than a rank may compile for.
    """
    log = faulted_log(played)
    slowed = any(kinds()[f["kind"]].harmless and kinds()[f["kind"]].lasting for f in tree["faults"])
    if log is None or not slowed:
        return False
    began_ns = max((e.time_ns for e in log.of(Kind.COORDINATOR_ADOPTED)), default=0)
    done = {e.step for e in log.of(Kind.STEP_COMMITTED) if e.time_ns > began_ns}
    limits = [SECONDS.search(str(rule["when"])) for rule in tree["stop_conditions"]]
    soon = any(limit and float(limit[1]) < HangLimits().compile_s for limit in limits)
    return soon and len(done) <= 1


def _taught_patience(tree: Tree, played: PlayResult) -> bool:
    """Whether most steps that the supervisor saw took so long, for a fault that held a rank, that
    the usual multiple of them is more than the job's time limit.
    """
    log = faulted_log(played)
    if log is None:
        return False
    began_ns = max((e.time_ns for e in log.of(Kind.COORDINATOR_ADOPTED)), default=0)
    injected = [e.time_ns for e in log.of(Kind.FAULT_INJECTED)]
    seen = [run for run in history_of(log).runs if run.committed_ns and run.start_ns >= began_ns]
    lately = seen[-WINDOW:]
    held = any(run.start_ns <= at <= run.end_ns for run in lately for at in injected)
    limits = [SECONDS.search(str(rule["when"])) for rule in tree["stop_conditions"]]
    patience_s = HangLimits().factor * median([run.seconds for run in lately] or [0.0])
    return held and any(limit and patience_s >= float(limit[1]) for limit in limits)


def _hidden(tree: Tree, played: PlayResult) -> bool:
    """Whether a fault that landed hid a rank's progress from its supervisor."""
    log = faulted_log(played)
    landed = {e.data["fault"] for e in log.of(Kind.FAULT_LANDED)} if log is not None else set()
    return bool(landed & _hiding(tree))


def _never_began(tree: Tree, played: PlayResult) -> bool:
    return played.outcomes.get("faulted") != "completed"


def _tiny_batches(tree: Tree, played: PlayResult) -> bool:
    """Whether a smaller world took batches of fewer samples than a gradient can be trusted with:
    real training may diverge then.
    """
    log = faulted_log(played)
    shrinks = tree["recovery"].get("batch") == "shrink"
    if log is None or not shrinks or not _real(tree, played):
        return False
    taken = [e.data["samples"] for e in log.of(Kind.STEP_COMMITTED)]
    return min(taken, default=TRUSTED) < TRUSTED


def _real(tree: Tree, played: PlayResult) -> bool:
    """Whether real processes trained, on a machine with other load."""
    return tree["launcher"]["kind"] != "sim"


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
UNSEEN = "could not be injected: no evidence within"
NOBODY_THERE = r"could not be injected: no process is on node \d+"
NO_OTHER_FILE = (
    "could not be injected: it could not act: FileNotFoundError: there is no other data file"
)
NOTHING_LEFT = "could not be injected: it could not act: FileNotFoundError: no data is left in it"
NO_DEVICE = "could not be injected: it could not act: RuntimeError: .* is the last device"
TOO_NOISY = (
    f"^{TOO_BUSY}",
    "of its own before the first fault: run it on a quieter machine$",
    "in all, too short to tell: raise workload.steps$",
)
"""Reasons why the speed of a job of milliseconds on a shared machine cannot be judged."""
EXCUSES: tuple[Excuse, ...] = (
    *(
        Excuse(name="fault-landed", verdict="inconclusive", says=why)
        for why in (*NEVER_DUE, *NOT_LANDED)
    ),
    Excuse(
        name="fault-landed",
        verdict="inconclusive",
        says=r"was due at step \d+, the supervisor saw the end of step \d+ as the last",
        when=_hidden,
    ),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=unlanded.slight),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=unlanded.brief),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=unlanded.names_a_sample),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=unlanded.displaced),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=unlanded.thrown_away),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=unlanded.stopped_before),
    Excuse(
        name="fault-landed",
        verdict="inconclusive",
        says=f"could not be injected: {ENDED_BEFORE}",
        when=unlanded.ended_otherwise,
    ),
    Excuse(name="fault-landed", verdict="inconclusive", says=NO_DEVICE, when=unlanded.lost_devices),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=unlanded.left_out_before),
    Excuse(name="fault-landed", verdict="inconclusive", says=NO_OTHER_FILE, when=unlanded.swaps),
    Excuse(name="fault-landed", verdict="inconclusive", says=NOTHING_LEFT, when=unlanded.emptied),
    Excuse(
        name="fault-landed", verdict="inconclusive", says=NOBODY_THERE, when=unlanded.without_ranks
    ),
    Excuse(name="fault-landed", verdict="inconclusive", says=NOBODY_THERE, when=unlanded.all_gone),
    Excuse(
        name="liveness",
        verdict="inconclusive",
        says=r"\d+ healthy steps? after the last fault, \d+ are needed",
    ),
    Excuse(name="liveness", verdict="inconclusive", says="too short to tell: raise workload.steps"),
    *(
        Excuse(name="liveness", verdict="inconclusive", says=why, when=_real, whole=True)
        for why in TOO_NOISY
    ),
    Excuse(name="liveness", verdict="fail", says="the job did not finish: gave-up", when=_insists),
    Excuse(
        name="liveness", verdict="fail", says="the job did not finish: gave-up", when=_unrecovered
    ),
    Excuse(
        name="liveness", verdict="fail", says="the job did not finish: gave-up", when=_never_agreed
    ),
    Excuse(
        name="liveness", verdict="fail", says="the job did not finish: gave-up", when=_no_node_left
    ),
    Excuse(name="liveness", verdict="fail", says="the job did not finish: halted", when=_cut_off),
    Excuse(
        name="liveness", verdict="fail", says="the job did not finish: halted", when=_common_stall
    ),
    Excuse(
        name="liveness", verdict="fail", says="the job did not finish: halted", when=_slow_to_start
    ),
    Excuse(
        name="liveness", verdict="fail", says="the job did not finish: halted", when=_may_compile
    ),
    Excuse(
        name="liveness",
        verdict="fail",
        says="the job did not finish: halted",
        when=_taught_patience,
    ),
    Excuse(
        name="loss-equality", verdict="inconclusive", says="common steps are too few to smooth over"
    ),
    *(
        Excuse(
            name=name,
            verdict="inconclusive",
            says="no committed step|no step was committed",
            when=_never_began,
        )
        for name in ("loss-equality", "nan-containment", "sample-accounting", "step-arithmetic")
    ),
    Excuse(name="loss-equality", verdict="fail", says="parameters differ", when=_left_spoilt),
    Excuse(
        name="replica-equality", verdict="inconclusive", says="no step has digests from two ranks"
    ),
    Excuse(
        name="replica-equality",
        verdict="inconclusive",
        says=r"\d+ of \d+ ranks left a digest of the last step",
    ),
    Excuse(name="loss-equality", verdict="fail", says="", when=_silent),
    Excuse(name="loss-equality", verdict="fail", says=AFTER_STEP.pattern, when=_lost_uncompared),
    Excuse(name="loss-equality", verdict="fail", says="^too bad", when=_tiny_batches, whole=True),
    Excuse(name="replica-equality", verdict="fail", says="ranks hold different", when=_uncompared),
)
