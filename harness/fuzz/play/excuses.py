"""The reasons for which a verdict other than pass is no defect, each with what must be true of the
scenario for it to count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from chaos.events.log import Kind, Log
from chaos.fault.base import Fault
from harness.fuzz.play.play import PlayResult, kinds
from harness.fuzz.play.uncompared import uncompared
from harness.judge.measure.pressure import TOO_BUSY
from recovery.detection.hangs import STALLS, HangLimits

Tree = Mapping[str, Any]
NOTICED_S = 1.0
"""A hang of so many seconds shows in the job's steps."""
TRUSTED = 4
"""Samples of the smallest batch whose gradient is expected to train."""
TRIGGERS = frozenset(("step", "steps", "from", "time", "event", "mtbf", "weibull"))
"""Keys of a fault's ``at``; each has one of them."""
SILENT = re.compile(r"silent for ([\d.]+) s")
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


def _faulted(played: PlayResult) -> Log | None:
    """The log of the faulted arm. Arms of real plays also have the cell and the repeat in their
    names.
    """
    named = (log for name, log in played.logs.items() if name.rpartition(".")[2] == "faulted")
    return next(named, None)


def _insists(tree: Tree, played: PlayResult) -> bool:
    """Whether faults strike so often that the same step may fail repeatedly."""
    once = ({"step"}, {"time"}, {"event"})
    again = any(f.get("retrigger") or f["at"].keys() & TRIGGERS not in once for f in tree["faults"])
    return again or "crash-loop" in _kinds(tree) or len(tree["faults"]) > 1


def _unrecovered(tree: Tree, played: PlayResult) -> bool:
    """Whether the job must end at its first failure."""
    return tree["recovery"]["strategy"] == "none"


def _never_agreed(tree: Tree, played: PlayResult) -> bool:
    """Whether a fault made replicas differ before they had agreed on any state in a checkpoint:
    then it is unknown which of two is right, and there is no state to return to.
    """
    log = _faulted(played)
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
    log = _faulted(played)
    return log is not None and uncompared(tree, log)


def _cut_off(tree: Tree, played: PlayResult) -> bool:
    """Whether ranks are cut off from each other for a number of steps, which are not made
    meanwhile.
    """
    cuts = ("node-isolate", "partition", "link-flap")
    return any(f["kind"] in cuts and isinstance(f.get("duration"), dict) for f in tree["faults"])


def _common_stall(tree: Tree, played: PlayResult) -> bool:
    """Whether half of the last generation or more was hit as it waited for data, and none of them
    was heard of again. To their supervisor the source of the data is slow, which it takes for a
    hang after ``between_s`` only; the job is to be halted before that.
    """
    log = _faulted(played)
    started = list(log.of(Kind.GENERATION_STARTED)) if log else []
    if log is None or not started:
        return False
    number, members = started[-1].generation, set(started[-1].data["members"])
    last_ns = {
        name: max(e.time_ns for e in log.by(name) if e.kind is not Kind.FAULT_EFFECT)
        for name in members
        if any(log.by(name))
    }
    still = {
        (e.data["target"] or {}).get("process")
        for e in log.of(Kind.FAULT_INJECTED)
        if e.generation == number
        and e.data.get("phase") == STALLS
        and last_ns.get((e.data["target"] or {}).get("process"), 0) <= e.time_ns
    }
    limits = [SECONDS.search(str(rule["when"])) for rule in tree["stop_conditions"]]
    soon = any(limit and float(limit[1]) < HangLimits().between_s for limit in limits)
    return soon and 2 * len(still & members) >= len(members)


def _slow_to_start(tree: Tree, played: PlayResult) -> bool:
    """Whether no step was ever made, and the supervisor spent half of the job's time limit on
    hangs; before the first step it cannot know how long a normal wait is.
    """
    log = _faulted(played)
    if log is None or any(log.of(Kind.STEP_COMMITTED)):
        return False
    limits = [SECONDS.search(str(rule["when"])) for rule in tree["stop_conditions"]]
    silent = (SILENT.search(e.data["detail"]) for e in log.of(Kind.FAILURE_DETECTED))
    waited = sum(float(found[1]) for found in silent if found)
    return any(limit and waited >= float(limit[1]) / 2 for limit in limits)


def _slight(tree: Tree, played: PlayResult) -> bool:
    """Whether a fault slows something, which may not show."""
    slow = (
        "straggler",
        "node-slow",
        "io-slow",
        "data-stall",
        "store-latency",
        "heartbeat-drop",
        "clock-skew",
    )
    return any(f["kind"] in slow or f["kind"].startswith("link-") for f in tree["faults"])


def _brief(tree: Tree, played: PlayResult) -> bool:
    """Whether a rank hangs too briefly to show in the job's steps."""
    return any(f.get("params", {}).get("hold_s", 60.0) < NOTICED_S for f in tree["faults"])


def _left_out_before(tree: Tree, played: PlayResult) -> bool:
    """Whether a poisoned sample had been left out when it was poisoned again."""
    log = _faulted(played)
    if log is None:
        return False
    skipped = [(e.time_ns, set(e.data["samples"])) for e in log.of(Kind.SAMPLES_SKIPPED)]
    return any(
        skipped_ns < e.time_ns and e.data["evidence"].get("sample") in samples
        for e in log.of(Kind.FAULT_EFFECT)
        for skipped_ns, samples in skipped
    )


def _displaced(tree: Tree, played: PlayResult) -> bool:
    """Whether wrong data replaced a poisoned sample in the step in which it was due."""
    log = _faulted(played)
    if log is None:
        return False
    effects = list(log.of(Kind.FAULT_EFFECT))
    poisoned = {e.data["evidence"]["sample"] for e in effects if "sample" in e.data["evidence"]}
    shifted = {(e.actor, e.step) for e in effects if "shift" in e.data["evidence"]}
    return any(
        (batch.actor, batch.step) in shifted and not poisoned.isdisjoint(batch.data["samples"])
        for batch in log.of(Kind.BATCH_TAKEN)
    )


def _thrown_away(tree: Tree, played: PlayResult) -> bool:
    """Whether values were changed in a pass of a step that its generation, ended by another
    failure, never committed.
    """
    log = _faulted(played)
    if log is None:
        return False
    seen = {e.data["fault"] for e in log.of(Kind.FAULT_LANDED)}
    committed = {(e.generation, e.step) for e in log.of(Kind.STEP_COMMITTED)}
    broken = {e.generation for e in log.of(Kind.FAILURE_DETECTED)}
    return any(
        event.data["kind"] == "tensor-corrupt"
        and event.data["fault"] not in seen
        and event.generation in broken
        and (event.generation, event.step) not in committed
        for event in log.of(Kind.FAULT_INJECTED)
    )


def _names_a_sample(tree: Tree, played: PlayResult) -> bool:
    """Whether the poisoned sample was chosen without regard to when it is due."""
    poisons = (f.get("params", {}) for f in tree["faults"] if f["kind"] == "poison-sample")
    return any(params.get("sample") is not None for params in poisons)


def _never_began(tree: Tree, played: PlayResult) -> bool:
    return played.outcomes.get("faulted") != "completed"


def _tiny_batches(tree: Tree, played: PlayResult) -> bool:
    """Whether a smaller world took batches of fewer samples than a gradient can be trusted with:
    real training may diverge then.
    """
    log = _faulted(played)
    shrinks = tree["recovery"].get("batch") == "shrink"
    if log is None or not shrinks or not _real(tree, played):
        return False
    taken = [e.data["samples"] for e in log.of(Kind.STEP_COMMITTED)]
    return min(taken, default=TRUSTED) < TRUSTED


def _real(tree: Tree, played: PlayResult) -> bool:
    """Whether real processes trained, on a machine with other load."""
    return tree["launcher"]["kind"] != "sim"


def _lost_devices(tree: Tree, played: PlayResult) -> bool:
    return "gpu-lost" in _kinds(tree)


def _swaps(tree: Tree, played: PlayResult) -> bool:
    """Whether a file of a checkpoint is to be swapped with another; a checkpoint written by one
    rank has no other.
    """
    return any(f.get("params", {}).get("mode") == "swap-shard" for f in tree["faults"])


def _emptied(tree: Tree, played: PlayResult) -> bool:
    """Whether a fault removes data of checkpoints, so that a second fault on one may find
    nothing.
    """
    modes = [
        f.get("params", {}).get("mode") for f in tree["faults"] if f["kind"] == "checkpoint-corrupt"
    ]
    return bool({"missing", "truncate", "lose-unsynced"}.intersection(modes))


def _without_ranks(tree: Tree, played: PlayResult) -> bool:
    """Whether there are more nodes than the ranks fill."""
    place = played.cell.scenario.topology if played.cell else None
    return place is not None and not all(place.ranks_on(node) for node in range(place.nodes))


def _all_gone(tree: Tree, played: PlayResult) -> bool:
    """Whether, by the log, every process ever started on a node had ended or was ordered to, when a
    fault found the node empty because of earlier faults.
    """
    log = _faulted(played)
    if log is None:
        return False
    ended = {
        e.data["process"]: min(e.time_ns, e.data.get("asked_ns") or e.time_ns)
        for e in log.of(Kind.PROCESS_EXITED)
    }
    killed = {
        (e.data["fault"], e.data["occurrence"]): e.data["target"].get("processes", ())
        for e in log.of(Kind.FAULT_INJECTED)
    }
    for hit in log.of(Kind.FAULT_EFFECT):  # reaped a moment later
        if hit.data["evidence"].get("signal") == "SIGKILL":
            key = (hit.data["fault"], hit.data["occurrence"])
            for name in killed.get(key, ()):
                ended[name] = min(hit.time_ns, ended.get(name, hit.time_ns))
    for failed in log.of(Kind.FAULT_FAILED):
        found = re.search(r"no process is on node ([\d, ]+)", str(failed.data["reason"]))
        nodes = [int(node) for node in found[1].split(",")] if found else []
        there = (
            s
            for s in log.of(Kind.PROCESS_SPAWNED)
            if s.data["node"] in nodes and s.seq < failed.seq
        )
        if any(ended.get(s.data["process"], failed.time_ns + 1) > failed.time_ns for s in there):
            return False
    return True


NEVER_DUE = (
    r"waited for \w+ number \d+, which never came",
    r"was due at step \d+, the run ended at \d+",
    r"was first due [\d.]+ s after the first step, and training lasted",
    r"its probability ruled out every arrival",
    r"was due [\d.]+ s after the first step, the run took",
    r"was due at step \d+, and there was no rank \d+ in it",
    r"was due at step \d+, and \w+, which it was for, had been lost to \w+ before it came there",
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
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=_slight),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=_brief),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=_names_a_sample),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=_displaced),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=_thrown_away),
    Excuse(name="fault-landed", verdict="inconclusive", says=NO_DEVICE, when=_lost_devices),
    Excuse(name="fault-landed", verdict="inconclusive", says=UNSEEN, when=_left_out_before),
    Excuse(name="fault-landed", verdict="inconclusive", says=NO_OTHER_FILE, when=_swaps),
    Excuse(name="fault-landed", verdict="inconclusive", says=NOTHING_LEFT, when=_emptied),
    Excuse(name="fault-landed", verdict="inconclusive", says=NOBODY_THERE, when=_without_ranks),
    Excuse(name="fault-landed", verdict="inconclusive", says=NOBODY_THERE, when=_all_gone),
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
    Excuse(name="liveness", verdict="fail", says="the job did not finish: halted", when=_cut_off),
    Excuse(
        name="liveness", verdict="fail", says="the job did not finish: halted", when=_common_stall
    ),
    Excuse(
        name="liveness", verdict="fail", says="the job did not finish: halted", when=_slow_to_start
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
    Excuse(name="loss-equality", verdict="fail", says="^too bad", when=_tiny_batches, whole=True),
    Excuse(name="replica-equality", verdict="fail", says="ranks hold different", when=_uncompared),
)
