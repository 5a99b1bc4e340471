"""What can be said in the one record: the closed set of kinds of events, and the data that each
must carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """Closed set of event kinds; ``REQUIRED`` lists the data keys each must carry."""

    # every actor
    ACTOR_STARTED = "actor_started"
    ACTOR_ENDED = "actor_ended"
    EVENTS_DROPPED = "events_dropped"
    # orchestrator: the run and its processes
    RUN_STARTED = "run_started"
    RUN_FINISHED = "run_finished"
    PROCESS_SPAWNED = "process_spawned"
    PROCESS_READY = "process_ready"
    PROCESS_EXITED = "process_exited"
    LEFTOVERS = "leftovers"
    FILES_DROPPED = "files_dropped"
    # orchestrator: nodes with an agent of their own
    NODE_JOINED = "node_joined"
    NODE_LOST = "node_lost"
    CLOCK_MEASURED = "clock_measured"
    # orchestrator: a command watched from outside
    COMMAND_STARTED = "command_started"
    COMMAND_ENDED = "command_ended"
    STEP_REPORTED = "step_reported"
    # orchestrator: what the health source says
    HEALTH_REPORTED = "health_reported"
    # orchestrator: what the machine has left for the job
    PRESSURE_READ = "pressure_read"
    # orchestrator: faults
    FAULT_PLANNED = "fault_planned"
    FAULT_INJECTED = "fault_injected"
    FAULT_LANDED = "fault_landed"
    FAULT_FAILED = "fault_failed"
    FAULT_HEALED = "fault_healed"
    # orchestrator: detection and recovery
    FAILURE_DETECTED = "failure_detected"
    COORDINATOR_ADOPTED = "coordinator_adopted"
    REPLICAS_AGREED = "replicas_agreed"
    DOUBTS_SETTLED = "doubts_settled"
    ABORT_SENT = "abort_sent"
    SURVIVORS_PARKED = "survivors_parked"
    DECISION = "decision"
    GENERATION_STARTED = "generation_started"
    GENERATION_READY = "generation_ready"
    # ranks
    GROUP_FORMED = "group_formed"
    STATE_READY = "state_ready"
    BATCH_TAKEN = "batch_taken"
    STEP_COMMITTED = "step_committed"
    NONFINITE_CAUGHT = "nonfinite_caught"
    PARKED = "parked"
    BUSY = "busy"
    BUSY_ENDED = "busy_ended"
    STATE_DIGEST = "state_digest"
    SAMPLES_SKIPPED = "samples_skipped"
    CHECKPOINT_SAVING = "checkpoint_saving"
    CHECKPOINT_PART = "checkpoint_part"
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_REFUSED = "checkpoint_refused"
    CHECKPOINT_DELETED = "checkpoint_deleted"
    CHECKPOINT_KEPT = "checkpoint_kept"
    CHECKPOINT_SET_ASIDE = "checkpoint_set_aside"
    FAULT_EFFECT = "fault_effect"
    ERROR_RAISED = "error_raised"


REQUIRED: Mapping[Kind, frozenset[str]] = MappingProxyType(
    {
        # host: machine name; wall_ns: unix time at the same moment as time_ns
        Kind.ACTOR_STARTED: frozenset({"pid", "host", "wall_ns"}),
        # of a rank: peak_rss_bytes, cpu_s: what it used, by the kernel's account (missing in older
        # logs)
        Kind.ACTOR_ENDED: frozenset(),
        # the file took none of this actor's lines from number `first` to `last`; why: in the
        # system's words
        Kind.EVENTS_DROPPED: frozenset({"first", "last", "why"}),
        # arm: "faulted"|"control"; cell: cell id; repeat: int; ranks, spares: provisioned; seed: of
        # this arm order: {"seed", "samples"} of the reference sample order; plus steps,
        # global_batch, strategy, checkpoint_every, launcher, and evaluate: {"every", "takes"},
        # empty where nobody evaluates between steps
        Kind.RUN_STARTED: frozenset(
            {
                "arm",
                "cell",
                "repeat",
                "seed",
                "ranks",
                "spares",
                "steps",
                "global_batch",
                "strategy",
                "order",
            }
        ),
        # outcome: completed|gave-up|halted|interrupted|timed-out|broken; refused: reports of a
        # command without a step
        Kind.RUN_FINISHED: frozenset({"outcome", "reason", "committed_step"}),
        # process: actor name ("w0"); role: worker|spare; mode: warm|cold|sim; node: its number;
        # device: its slot
        Kind.PROCESS_SPAWNED: frozenset({"process", "pid", "role", "mode"}),
        Kind.PROCESS_READY: frozenset({"process"}),
        # exit_code or signal is set, the other None; expected: we asked for it (asked_ns: when
        # first, if we did); last_seq: last event the process claims
        Kind.PROCESS_EXITED: frozenset(
            {"process", "pid", "exit_code", "signal", "expected", "last_seq"}
        ),
        # processes: [{pid, process}] of ours still alive after shutdown (empty is good);
        # shared_memory, ports: likewise of_command: [{name, held_by}] shared memory that a command
        # left, removed since
        Kind.LEFTOVERS: frozenset({"processes", "ports", "shared_memory"}),
        # event logs and outputs that were deleted, cut or not taken; bytes: of all of them; why: in
        # words
        Kind.FILES_DROPPED: frozenset({"files", "bytes", "why"}),
        # an agent was admitted, again too. host: name of the machine; boot: id of its boot;
        # address: where its ranks listen; devices: that torch can see there
        Kind.NODE_JOINED: frozenset({"node", "host", "boot", "address", "devices"}),
        # why: in words of the platform, or of the connection that was lost
        Kind.NODE_LOST: frozenset({"node", "why"}),
        # the node's monotonic clock less the coordinator's at the time of the event, right to
        # within bound_ns
        Kind.CLOCK_MEASURED: frozenset({"node", "offset_ns", "bound_ns"}),
        # attempt: from 1; argv: as started
        Kind.COMMAND_STARTED: frozenset({"attempt", "pid", "argv"}),
        # exit_code or signal is set, the other None; asked: we ended it; left: [{pid, name,
        # detached}] that lived on when it had ended well, killed since
        Kind.COMMAND_ENDED: frozenset({"attempt", "exit_code", "signal", "asked"}),
        # what a command said of its progress. rank: None where it did not say; samples: of that
        # rank alone; reported_ns: when it said so, by its own (the host's) clock; source:
        # beacon|output; unread: name -> what it gave for it, where that is no number
        Kind.STEP_REPORTED: frozenset({"rank", "loss", "samples", "reported_ns", "source"}),
        # what: xid|ecc|thermal|nvlink; code: number of the XID, else a count or value; device,
        # node, rank: whose, or None; source: nvml|injected
        Kind.HEALTH_REPORTED: frozenset({"what", "code", "device", "node", "rank", "source"}),
        # counts of a machine since some beginning, None where the kernel does not say: cpus of it;
        # some_s: somebody wanted a processor in vain; steal_s: taken by its hypervisor, over all
        # cpus; ranks: process -> [ran, stood in a run queue] of its training thread, seconds; node
        # (missing: the harness's machine): whose agent read it, at read_ns of our clock
        Kind.PRESSURE_READ: frozenset({"cpus", "some_s", "steal_s", "ranks"}),
        # fault: id in the scenario; target: resolved {"process"|"rank"|"checkpoint": ...}; at:
        # resolved trigger; lasts: it goes on after its act, until it is healed; at.fires: how often
        # at each point, time or event at most (both missing in older logs)
        Kind.FAULT_PLANNED: frozenset({"fault", "kind", "target", "at"}),
        # act: number of the first occurrence of those that hit at once (missing in older logs);
        # phase: of the step, where its ranks hold or are due (missing in older logs, and where
        # nobody waits for a point); absent: processes that should have held there with the others,
        # and were waited for in vain (missing if there are none); late_steps, late, missed (only if
        # it acts later than planned): so many steps, why, and whether ranks should have held for it
        Kind.FAULT_INJECTED: frozenset({"fault", "kind", "occurrence", "target"}),
        # witness: who saw it, never the injector; evidence: what was seen
        Kind.FAULT_LANDED: frozenset({"fault", "occurrence", "witness", "evidence"}),
        Kind.FAULT_FAILED: frozenset({"fault", "occurrence", "reason"}),
        Kind.FAULT_HEALED: frozenset({"fault", "occurrence", "how"}),
        # failure: running number; cause: see recovery.policy.strategy.Cause
        # (exit|hang|error|nonfinite|diverged|start-timeout| unfit|notice); process and rank blamed.
        # Of a hang (missing in older logs): silent_s: it showed no sign of life for so long, more
        # than limit_s; last_seq: of the last event it had noted by then; stopped: the kernel showed
        # it as stopped for all of silent_s. applied: of values that a state holds already
        Kind.FAILURE_DETECTED: frozenset({"failure", "cause", "process", "rank", "detail"}),
        # a supervisor took the job over from one that was lost. down_s: nobody supervised for so
        # long; events: lines of the log it knows the job by; stage: the lost one's, for people
        Kind.COORDINATOR_ADOPTED: frozenset({"down_s", "events", "members", "stage"}),
        # event step = the last of which all replicas' digests were the same; saved: step of the
        # newest checkpoint known to be committed that this vouches for, or None
        Kind.REPLICAS_AGREED: frozenset({"saved"}),
        # what may hold a corrupted state was put out of the way; left: what was not yet, as in
        # generation_started
        Kind.DOUBTS_SETTLED: frozenset({"left"}),
        Kind.ABORT_SENT: frozenset({"processes"}),
        # processes: {name: {"step": last applied step, "valid": bool}}
        Kind.SURVIVORS_PARKED: frozenset({"processes"}),
        Kind.DECISION: frozenset({"actions", "reason"}),
        # members: [process of rank 0, 1, ...]; state: initial|peer|checkpoint|kept; source: process
        # or None cause: start|failure|grow|refill|notice shards: ranks that hold one copy of the
        # model together; sources: receiving process -> who sends it its part; finish: a step that
        # some have applied, and the others are told the end of (0: none); doubts (if there are
        # any): [[before, step]], what a generation before that one saved after that step may hold a
        # corrupted state
        Kind.GENERATION_STARTED: frozenset({"members", "state", "source", "cause"}),
        # resume_step: step all members now hold (training goes on with resume_step + 1)
        Kind.GENERATION_READY: frozenset({"members", "resume_step", "checkpoint"}),
        Kind.GROUP_FORMED: frozenset({"rank", "world", "seconds"}),
        # origin: initial|kept|peer|checkpoint; event step = the step held
        Kind.STATE_READY: frozenset({"rank", "origin", "source", "seconds"}),
        # samples: this rank's share of the global batch of `step`
        Kind.BATCH_TAKEN: frozenset({"rank", "epoch", "samples"}),
        # samples: global sample count reduced over all ranks; loss: global mean; seconds: {phase:
        # s}
        Kind.STEP_COMMITTED: frozenset(
            {
                "rank",
                "world",
                "samples",
                "loss",
                "lr",
                "grad_norm",
                "optimizer_step",
                "scheduler_step",
                "seconds",
            }
        ),
        Kind.NONFINITE_CAUGHT: frozenset({"rank", "blamed", "what"}),
        # valid: False when the rank was in the middle of receiving state; why:
        # aborted|pause|nonfinite
        Kind.PARKED: frozenset({"valid", "why"}),
        # a rank, or a process of a command, does something else than training, as it says itself;
        # what: in its words; limit_s: for so long at most; rank: None of a process that has none
        # now, or did not say
        Kind.BUSY: frozenset({"rank", "what", "limit_s"}),
        # seconds: it took; a process that ends in the midst of it may leave no such line
        Kind.BUSY_ENDED: frozenset({"rank", "what", "seconds"}),
        # by the supervisor: ids that the job leaves out from step `since` on, as nobody can compute
        # them
        Kind.SAMPLES_SKIPPED: frozenset({"samples", "since"}),
        # hex digests of the state after `step`
        Kind.STATE_DIGEST: frozenset({"rank", "parameters", "optimizer", "scheduler", "rng"}),
        Kind.CHECKPOINT_SAVING: frozenset({"checkpoint"}),
        # by a rank that writes a part of it and does not commit it. state: begun|written|failed;
        # seconds: since it began; error: of failed
        Kind.CHECKPOINT_PART: frozenset({"checkpoint", "state", "seconds", "error"}),
        Kind.CHECKPOINT_COMMITTED: frozenset({"checkpoint", "bytes", "seconds"}),
        Kind.CHECKPOINT_FAILED: frozenset({"checkpoint", "error"}),
        Kind.CHECKPOINT_REFUSED: frozenset({"checkpoint", "reason"}),
        # left: by retention, the names of those that stay
        Kind.CHECKPOINT_DELETED: frozenset({"checkpoint"}),
        # retention wanted it gone, and the disk refused; checkpoint: "" when not even the directory
        # could be read
        Kind.CHECKPOINT_KEPT: frozenset({"checkpoint", "error"}),
        # it may hold a corrupted state: it has another name now, and is never restored
        Kind.CHECKPOINT_SET_ASIDE: frozenset({"checkpoint", "reason"}),
        # what a rank measured while a fault acts on it (bandwidth, digests, durations)
        Kind.FAULT_EFFECT: frozenset({"fault", "occurrence", "evidence"}),
        Kind.ERROR_RAISED: frozenset({"type", "message"}),
    }
)
