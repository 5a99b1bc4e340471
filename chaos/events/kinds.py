"""The closed set of event kinds, and the data keys that each must carry."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """Closed set of event kinds; ``REQUIRED`` lists the data keys each must carry."""

    __hash__ = str.__hash__  # that of its text, as its equality is; Enum's own is slow

    # every actor
    ACTOR_STARTED = "actor_started"
    ACTOR_ENDED = "actor_ended"
    EVENTS_DROPPED = "events_dropped"
    # orchestrator: the run and its processes
    RUN_STARTED = "run_started"
    RUN_FINISHED = "run_finished"
    NAMES_RESERVED = "names_reserved"
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
    # orchestrator: what drivers report, and what detectors make of readings
    HEALTH_REPORTED = "health_reported"
    HEALTH_ALARM = "health_alarm"
    # orchestrator: places that were not used
    TAINTS_HONOURED = "taints_honoured"
    # orchestrator: a suspect place was checked before a process rejoins; a place was tainted
    PLACE_CHECKED = "place_checked"
    PLACE_TAINTED = "place_tainted"
    # orchestrator: what the machine has left for the job
    PRESSURE_READ = "pressure_read"
    MACHINE_BUSY = "machine_busy"
    # orchestrator: faults
    FAULT_PLANNED = "fault_planned"
    FAULT_INJECTED = "fault_injected"
    FAULT_LANDED = "fault_landed"
    FAULT_FAILED = "fault_failed"
    FAULT_HEALED = "fault_healed"
    # orchestrator: detection and recovery
    FAILURE_DETECTED = "failure_detected"
    STACKS_DUMPED = "stacks_dumped"
    COLLECTIVES_DUMPED = "collectives_dumped"
    COORDINATOR_ADOPTED = "coordinator_adopted"
    REPLICAS_AGREED = "replicas_agreed"
    DOUBTS_SETTLED = "doubts_settled"
    ABORT_SENT = "abort_sent"
    SURVIVORS_PARKED = "survivors_parked"
    DECISION = "decision"
    SPARE_PLACED = "spare_placed"
    GENERATION_STARTED = "generation_started"
    GENERATION_READY = "generation_ready"
    PACE_LEARNED = "pace_learned"
    # ranks
    GROUP_FORMED = "group_formed"
    STATE_READY = "state_ready"
    SPARE_SYNCED = "spare_synced"
    SPARE_DROPPED = "spare_dropped"
    SPARE_REHEARSED = "spare_rehearsed"
    STANDBY_FORMED = "standby_formed"
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
        # host: machine name; wall_ns: unix time at the same moment as time_ns; run: the run's id in
        # its seal (missing in a simulation, outside the harness and in older logs)
        Kind.ACTOR_STARTED: frozenset({"pid", "host", "wall_ns"}),
        # of a rank: peak_rss_bytes, cpu_s: usage counted by the kernel (missing in older logs)
        Kind.ACTOR_ENDED: frozenset(),
        # events `first` to `last` of this actor could not be written; why: the system's error text
        Kind.EVENTS_DROPPED: frozenset({"first", "last", "why"}),
        # arm: "faulted"|"control"; cell: cell id; repeat: int; ranks, spares: provisioned; seed: of
        # this arm; order: {"seed", "samples"} of the reference sample order; plus steps,
        # global_batch, strategy, checkpoint_every, launcher, and evaluate: {"every", "takes"},
        # empty without evaluation between steps
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
        # many processes are started at once, under names with a number below this one
        Kind.NAMES_RESERVED: frozenset({"below"}),
        # process: actor name ("w0"); role: worker|spare; mode: warm|cold|sim; node: its number;
        # device: its slot
        Kind.PROCESS_SPAWNED: frozenset({"process", "pid", "role", "mode"}),
        Kind.PROCESS_READY: frozenset({"process"}),
        # exit_code or signal is set, the other None; expected: we asked for it (asked_ns: when
        # first, if we did); last_seq: number of the last event the process had written; hung_s:
        # seconds for which a keeper had not answered, and was ended for that (missing otherwise)
        Kind.PROCESS_EXITED: frozenset(
            {"process", "pid", "exit_code", "signal", "expected", "last_seq"}
        ),
        # processes: [{pid, process}] of ours still alive after shutdown (should be empty);
        # shared_memory, ports: likewise; of_command: [{name, held_by}] shared memory that a command
        # left behind, removed since
        Kind.LEFTOVERS: frozenset({"processes", "ports", "shared_memory"}),
        # event logs and outputs that were deleted, truncated or not collected; bytes: their total
        # size; why: in words
        Kind.FILES_DROPPED: frozenset({"files", "bytes", "why"}),
        # an agent was admitted, for the first time or again. host: name of the machine; boot: its
        # boot id; address: where its ranks listen; devices: those torch sees there
        Kind.NODE_JOINED: frozenset({"node", "host", "boot", "address", "devices"}),
        # why: message of the platform, or of the lost connection; taken_away (only if so): its
        # agent was seen to have ended, and not by an error of its own as far as is known
        Kind.NODE_LOST: frozenset({"node", "why"}),
        # the node's monotonic clock minus the coordinator's at the time of the event, accurate to
        # within bound_ns
        Kind.CLOCK_MEASURED: frozenset({"node", "offset_ns", "bound_ns"}),
        # attempt: from 1; argv: as started
        Kind.COMMAND_STARTED: frozenset({"attempt", "pid", "argv"}),
        # exit_code or signal is set, the other None; asked: we ended it; left: [{pid, name,
        # detached}] processes that outlived its successful end, killed since
        Kind.COMMAND_ENDED: frozenset({"attempt", "exit_code", "signal", "asked"}),
        # progress reported by a command. rank: None if not reported; samples: of that rank alone;
        # reported_ns: time of the report on its own (the host's) clock; source: beacon|output;
        # unread: name -> reported value, where it is not a number
        Kind.STEP_REPORTED: frozenset({"rank", "loss", "samples", "reported_ns", "source"}),
        # what: xid|ecc|thermal|nvlink; code: number of the XID, else a count or value; device,
        # node, rank: those affected, or None; source: nvml|injected
        Kind.HEALTH_REPORTED: frozenset({"what", "code", "device", "node", "rank", "source"}),
        # what: name of the detector's alarm, or device-lost; lasted_s: since when; value exceeds
        # threshold, both in the detector's unit; evidence: name -> number or text
        Kind.HEALTH_ALARM: frozenset(
            {"what", "device", "node", "rank", "lasted_s", "value", "threshold", "evidence"}
        ),
        # taints that hold for a place of the job: [{place, by, reason, since}]; nodes, devices: the
        # job's own names of places where processes start only if there are no others (missing: none
        # was tainted, or an older log)
        Kind.TAINTS_HONOURED: frozenset({"taints", "nodes", "devices"}),
        # why: what made it suspect; fit: True, False, or None where nothing could be measured;
        # said: words of the check; seconds: it took
        Kind.PLACE_CHECKED: frozenset({"node", "device", "why", "fit", "said", "seconds"}),
        # place: as a taint names it; by: alarm|preflight
        Kind.PLACE_TAINTED: frozenset({"place", "by"}),
        # cumulative counters of a machine, None where the kernel does not offer them. cpus: number;
        # some_s: time in which some task waited for a processor; steal_s: time taken by the
        # hypervisor, over all cpus; ranks: process -> [running, waiting in a run queue] of its
        # training thread, seconds; node: whose agent read it, at read_ns of our clock (missing: the
        # harness's machine)
        Kind.PRESSURE_READ: frozenset({"cpus", "some_s", "steal_s", "ranks"}),
        # others: processors of this machine that programs which are not of the arm used while it
        # ran, on average; cpus: it has; written only if that is much (chaos.planning.load)
        Kind.MACHINE_BUSY: frozenset({"others", "cpus"}),
        # fault: id in the scenario; target: resolved {"process"|"rank"|"checkpoint": ...}; at:
        # resolved trigger; lasts: it continues after its act until it is healed; at.fires: maximum
        # firings at each point, time or event (both missing in older logs)
        Kind.FAULT_PLANNED: frozenset({"fault", "kind", "target", "at"}),
        # act: number of the first of the occurrences that hit together (missing in older logs);
        # phase: of the step, where its ranks hold or are due (missing in older logs, and without a
        # point to wait for); absent: processes that should have held there with the others but
        # never came (missing if none); only if it acts later than planned: late_steps (by how many
        # steps), late (why), missed (whether ranks should have held for it)
        Kind.FAULT_INJECTED: frozenset({"fault", "kind", "occurrence", "target"}),
        # witness: source of the evidence, never the injector; evidence: what was observed
        Kind.FAULT_LANDED: frozenset({"fault", "occurrence", "witness", "evidence"}),
        Kind.FAULT_FAILED: frozenset({"fault", "occurrence", "reason"}),
        # begun_ns: when its undoing began, on this log's clock: its target may be free from then on
        # (missing in older logs, and where nothing was undone)
        Kind.FAULT_HEALED: frozenset({"fault", "occurrence", "how"}),
        # failure: running number; cause: see recovery.policy.strategy.Cause
        # (exit|hang|error|nonfinite|diverged|start-timeout|unfit|notice); process and rank blamed.
        # For a hang (missing in older logs): silent_s: time without a heartbeat, more than limit_s;
        # last_seq: of the last event it had written; stopped: the kernel showed it as stopped for
        # all of silent_s; ras: what NCCL's RAS had said of it by then, where it had. applied: the
        # state already holds the refused values
        Kind.FAILURE_DETECTED: frozenset({"failure", "cause", "process", "rank", "detail"}),
        # after a hang was declared: what a process did when it, or the one that it waited for,
        # was suspected. role: hung|peer (waited in a collective)|stuck (all waited, nobody was
        # blamed); answered: it wrote something; frames: of its training thread, the innermost
        # first, "path:line in function"; file: beside the process's output, with all frames, "" if
        # it could not be kept
        Kind.STACKS_DUMPED: frozenset({"process", "role", "answered", "frames", "file"}),
        # with stacks_dumped, of the same processes: in which collectives a rank stood by torch's
        # flight recorder. entries: [{group, seq, op, sizes, state: done|started|scheduled}], of
        # each group of its generation the last finished and the first unfinished; why: there are
        # none; rank: its own word, None without an answer. role ras: without entries, and why is
        # what NCCL's RAS says of the process, as soon as it answers
        Kind.COLLECTIVES_DUMPED: frozenset({"process", "role", "rank", "entries", "why"}),
        # a supervisor took the job over from one that was lost. down_s: time without a supervisor;
        # events: number of log lines from which it learned the job's state; stage: of the lost
        # supervisor, for people
        Kind.COORDINATOR_ADOPTED: frozenset({"down_s", "events", "members", "stage"}),
        # event step = the last step at which all replicas' digests agreed; saved: step of the
        # newest checkpoint known to be committed that this agreement covers, or None
        Kind.REPLICAS_AGREED: frozenset({"saved"}),
        # checkpoints that may hold a corrupted state were set aside; left: those not set aside yet,
        # in the form of generation_started's doubts
        Kind.DOUBTS_SETTLED: frozenset({"left"}),
        Kind.ABORT_SENT: frozenset({"processes"}),
        # processes: {name: {"step": last applied step, "valid": bool}}; spares: the step that each
        # live spare holds; absent where some rank holds a whole state
        Kind.SURVIVORS_PARKED: frozenset({"processes"}),
        # options, chosen: what an adaptive strategy weighed, cheapest first ({"name", "rank_s",
        # "parts"}: rank-seconds), and the name of what it took; absent where nothing was weighed
        Kind.DECISION: frozenset({"actions", "reason"}),
        # members: [process of rank 0, 1, ...]; state: initial|peer|spare|checkpoint|kept; source:
        # process or None; cause: start|failure|grow|refill|notice; shards: number of ranks that
        # hold one copy of the model; sources: receiving process -> process that sends its part;
        # finish: a step that only some ranks have applied and the others still complete (0: none);
        # rewinds (of strategy adaptive): {count, recalled, failures, watched_s, mtbf_s, save_s,
        # every_s}, by which checkpoints of every: auto are spaced (recovery.policy.interval);
        # doubts (if any): [[before, step]]: checkpoints saved by generations before `before`,
        # after `step`, may hold a corrupted state
        Kind.GENERATION_STARTED: frozenset({"members", "state", "source", "cause"}),
        # resume_step: step whose state all members hold (training continues with resume_step + 1)
        Kind.GENERATION_READY: frozenset({"members", "resume_step", "checkpoint"}),
        # a spare is told to hold and follow part `shard` of the model, which it keeps for life
        Kind.SPARE_PLACED: frozenset({"process", "shard"}),
        # standby (if so): True: it had been formed beside the last one
        Kind.GROUP_FORMED: frozenset({"rank", "world", "seconds"}),
        # origin: initial|kept|peer|checkpoint|live (a spare that had followed the job); event step
        # = the step of the state held; bytes (of a member that a generation with a live spare
        # completes): what it received of the state: nothing, or the last step, or all of it
        Kind.STATE_READY: frozenset({"rank", "origin", "source", "seconds"}),
        # by a spare that follows the job from event step on; how: equal (it held that state
        # already) | copy; bytes: copied
        Kind.SPARE_SYNCED: frozenset({"how", "bytes", "seconds"}),
        # by the rank that feeds it: the process `spare` does not follow any more, until it gets the
        # whole state
        Kind.SPARE_DROPPED: frozenset({"spare", "why"}),
        # by a spare before it is ready, alone: it has trained a step that counts for nothing;
        # error: what of the script ended it before step.commit(), "" if nothing did
        Kind.SPARE_REHEARSED: frozenset({"seconds", "error"}),
        # by the supervisor, for its successor: the median step, the longest first step, and by
        # phase the longest silence that ended well, in seconds
        Kind.PACE_LEARNED: frozenset({"step_s", "first_s", "silences"}),
        # by the supervisor: these are connected, beside what they do, as the next generation's
        # group if rank `lost` is lost
        Kind.STANDBY_FORMED: frozenset({"lost", "members"}),
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
        # valid: False if the rank was still receiving its state; why: aborted|pause|nonfinite
        Kind.PARKED: frozenset({"valid", "why"}),
        # a rank, or a process of a command, reports that it does something other than training;
        # what: its own words; limit_s: maximum duration; rank: None if the process has no rank now,
        # or did not report one
        Kind.BUSY: frozenset({"rank", "what", "limit_s"}),
        # seconds: duration; a process that ends meanwhile may leave no such line
        Kind.BUSY_ENDED: frozenset({"rank", "what", "seconds"}),
        # by the supervisor: ids of samples that the job skips from step `since` on, because no rank
        # can compute them
        Kind.SAMPLES_SKIPPED: frozenset({"samples", "since"}),
        # hex digests of the state after `step`
        Kind.STATE_DIGEST: frozenset({"rank", "parameters", "optimizer", "scheduler", "rng"}),
        Kind.CHECKPOINT_SAVING: frozenset({"checkpoint"}),
        # by a rank that writes a part of a checkpoint and does not commit it. state:
        # begun|written|failed; seconds: since it began; error: if failed
        Kind.CHECKPOINT_PART: frozenset({"checkpoint", "state", "seconds", "error"}),
        Kind.CHECKPOINT_COMMITTED: frozenset({"checkpoint", "bytes", "seconds"}),
        Kind.CHECKPOINT_FAILED: frozenset({"checkpoint", "error"}),
        Kind.CHECKPOINT_REFUSED: frozenset({"checkpoint", "reason"}),
        # left: by retention, the names of those that stay
        Kind.CHECKPOINT_DELETED: frozenset({"checkpoint"}),
        # retention could not delete it; checkpoint: "" if not even the directory could be read
        Kind.CHECKPOINT_KEPT: frozenset({"checkpoint", "error"}),
        # it may hold a corrupted state, so it was renamed and is never restored
        Kind.CHECKPOINT_SET_ASIDE: frozenset({"checkpoint", "reason"}),
        # measured by a rank while a fault acts on it (bandwidth, digests, durations)
        Kind.FAULT_EFFECT: frozenset({"fault", "occurrence", "evidence"}),
        Kind.ERROR_RAISED: frozenset({"type", "message"}),
    }
)
