"""The job's members, whether replicas held the same state, and whether the job made progress."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence import busy
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, unknown, verdict_of
from trainchaos.harness.judge.measure.digests import diverged, final_digests, sound_digests
from trainchaos.harness.judge.measure.partition import Ideal
from trainchaos.harness.judge.measure.pauses import net_s
from trainchaos.harness.judge.measure.pressure import TOO_BUSY, others_of
from trainchaos.harness.judge.measure.refused import refused_at, refused_states
from trainchaos.harness.judge.record.history import Generation, History, StepRun
from trainchaos.harness.judge.record.kept_in_memory import PLACE, REMEMBERED, keepers
from trainchaos.harness.judge.record.observed import unseen
from trainchaos.harness.judge.results import Finding

ALIKE = ("loss", "lr", "grad_norm", "optimizer_step", "scheduler_step")
"""What all ranks say alike of a step."""
OURS = ("gpt", "mlp")
"""Workloads known to learn in every step."""
STILL_S, STILL = 10.0, 20.0
"""A step that took so long, and so many times as long as usual, is a standstill."""
STARVED_STEPS = 20  # of ranks that other programs hold up: one step differs much from the next
HEALTHY_STEPS = 5
_NOBODY = object()
HEALTHY_S = 1.0
HEALTHY_RATE = 0.5


def membership(evidence: Evidence) -> Finding:
    """Generations have the members, ranks and sizes that they announce; ranks and spares are as
    provisioned.

    A strategy that promises an exact result keeps the full world until it has lost more members
    than it had spares, of some part of the model where each spare follows one.
    """
    history = evidence.history
    if not history.generations:
        return unknown("no generation was formed")
    problems = _spares(history)
    first = history.generations[0]
    if first.world != history.info.ranks:
        problems.append(
            f"the first generation has {first.world} ranks instead of {history.info.ranks}"
        )
    for generation in history.generations:
        problems += _announced(evidence, generation)
    problems += [p for run in history.runs for p in _claimed(history, run)]
    sizes = " -> ".join(str(generation.world) for generation in history.generations)
    return verdict_of(problems, f"world size {sizes}, {history.info.spares} spares")


def _spares(history: History) -> list[str]:
    started = [
        e
        for e in history.log.of(Kind.PROCESS_SPAWNED)
        if e.data["role"] == "spare" and e.time_ns <= history.began_ns
    ]
    if len(started) == history.info.spares:
        return []
    return [f"{len(started)} spares were started, {history.info.spares} promised"]


def _announced(evidence: Evidence, generation: Generation) -> list[str]:
    history, number = evidence.history, generation.number
    problems = []
    if len(set(generation.members)) < generation.world:
        problems.append(f"generation {number} has one process twice")
    problems += [
        f"generation {number} counts {name}, which is dead"
        for name in generation.members
        if history.exited_ns.get(name, math.inf) < generation.started_ns
    ]
    if not 1 <= generation.world <= history.info.ranks:
        problems.append(
            f"generation {number} has {generation.world} ranks, provisioned were"
            f" {history.info.ranks}"
        )
    shrank = generation.world < history.info.ranks and evidence.keeps_world
    if shrank and (why := without_need(history, generation)):
        problems.append(f"generation {number} shrank to {generation.world} ranks {why}")
    for event in history.log.of(Kind.GROUP_FORMED):
        if event.generation == number:
            problems += _wrong_rank(generation, event)
    return problems


def _claimed(history: History, run: StepRun) -> list[str]:
    generation = history.generation(run.generation)
    if generation is None:
        return []
    given = [generation.ranks.get(name, _NOBODY) for name in run.done.actors]
    if run.done.said["rank"] == given and run.done.all_say("world", generation.world):
        return []
    return [problem for event in run.commits for problem in _wrong_rank(generation, event)]


def _wrong_rank(generation: Generation, event: Event) -> list[str]:
    rank, world, number = event.data["rank"], event.data["world"], generation.number
    if world != generation.world:
        return [
            f"{event.actor} works in a world of {world}, generation {number} has {generation.world}"
        ]
    held = generation.ranks.get(event.actor)
    if held is None:
        return [f"{event.actor} joined generation {number}, of which it is not a member"]
    if held != rank:
        return [f"{event.actor} acts as rank {rank}, generation {number} gave it another"]
    return []


def replica_equality(evidence: Evidence) -> Finding:
    """All ranks that hold the same part of the model hold the same parameters, optimizer and
    scheduler state after a step, and all report the same loss, learning rate, gradient norm and
    step counters. Buffers and registered objects may
    differ: loss-equality compares them with the control arm's. Excluded are ranks that the
    supervisor named at that step for a different or non-finite state.

    Random generators belong to a rank: their digest must be the same whenever that rank does that
    step in a world of that size, in this arm and in the control arm (they are derived from seed,
    rank and step).
    """
    history = evidence.history
    problems = [
        f"step {run.step}: ranks disagree on {name}"
        for run in history.runs
        for name in ALIKE
        if not _alike(run.done.said[name])
    ]
    groups: dict[tuple[int, int, int], list[Event]] = defaultdict(list)
    for event in sound_digests(history):
        shard = event.data["rank"] % history.shards
        groups[(event.generation, event.step or 0, shard)].append(event)
    for (number, step, _), events in sorted(groups.items()):
        for part in ("parameters", "optimizer", "scheduler"):
            if len({event.data[part] for event in events}) > 1:
                problems.append(f"step {step}, generation {number}: ranks hold different {part}")
    problems += [*_generators(evidence), *_constant(evidence)]
    if problems:
        return verdict_of(problems, "")
    last = final_digests(history).get(history.committed_step, {})
    run = history.lineage.get(history.committed_step)
    named = len(diverged(history, history.committed_step))
    if run is not None:
        named += refused_at(refused_states(history), run.generation, run.step)
    if history.outcome == "completed" and run is not None and len(last) + named < run.world:
        return unknown(f"{len(last)} of {run.world} ranks left a digest of the last step")
    if (
        not any(len(events) > 1 for events in groups.values())
        and history.info.ranks > history.shards
    ):
        return unknown(
            "no step has digests from two ranks: lower workload.checkpoint.every, or raise steps"
        )
    return passed(f"{len(groups)} sets of digests agree")


def _constant(evidence: Evidence) -> Iterator[str]:
    """Parameters or optimizer state of a rank that are the same after two different steps of one
    generation: nothing was trained, or digests leave them out. What a script trains is not known.
    """
    history, spec = evidence.history, evidence.cell.scenario.workload
    if spec.kind not in OURS:
        return
    # plain gradient descent has no state
    watched = ("parameters", *(("optimizer",) if spec.params.get("momentum") != 0 else ()))
    before: dict[tuple[int, int], Event] = {}
    for event in sound_digests(history):
        key, step = (event.generation, event.data["rank"]), event.step or 0
        earlier = before.get(key)
        if earlier is not None and (earlier.step or 0) < step:
            for part in watched:
                if earlier.data[part] == event.data[part]:
                    yield (
                        f"{event.actor} holds the same {part} after step {step} as after step"
                        f" {earlier.step}"
                    )
                    return
        before[key] = event


def _alike(values: Sequence[Any]) -> bool:
    """Whether all print alike, so that they agree to the last bit. Equal floats do, but for 0."""
    first = values[0]
    if first and set(map(type, values)) == {float} and values.count(first) == len(values):
        return True
    return len({repr(value) for value in values}) == 1


def _generators(evidence: Evidence) -> list[str]:
    known: dict[tuple[int, int, int], str] = {}
    problems = []
    for history in (evidence.control_history, evidence.history):
        for event in history.log.of(Kind.STATE_DIGEST) if history else ():
            generation = history.generation(event.generation) if history else None
            if generation is None:
                continue
            key = (event.data["rank"], event.step or 0, generation.world)
            if known.setdefault(key, event.data["rng"]) != event.data["rng"]:
                problems.append(f"random generators of rank {key[0]} differ at step {key[1]}")
    return problems


def liveness(evidence: Evidence) -> Finding:
    """The job finished, stood still in no step that no fault explains, and at the end ran at half
    the control arm's rate or better, in proportion to its world.

    A standstill is a step of STILL_S and STILL times the usual step, and longer than any of the
    control arm's and before the first fault; the first step of a generation, and one in which a
    rank said that it was busy (``job.busy``), is none.

    The rate is the median of the surviving steps after the last injection with no lasting fault
    active: of their last second, and of at least 5, as a few steps of milliseconds only show the
    machine's noise. A lower rate fails, unless it proves nothing: the arm's ranks waited longer for
    a processor per second of running than those they are compared with
    (``harness.judge.measure.pressure``; the explained part is subtracted), or no fault was injected
    before, or other programs used much of the machine, it is unknown how long its ranks waited or
    they got less than a third of the processor time that they wanted, and there are fewer than
    ``STARVED_STEPS`` steps to judge by, or the arm was as slow in the last second before its first
    fault (so the machine was
    slow throughout), or there is less than a second to judge by, or to compare with where there is
    no control arm. A job that is expected to stop
    (``expect.outcome: fail-stop``) has to stop in good order.
    """
    history, stops = evidence.history, evidence.expects("fail-stop")
    done = f"step {history.committed_step} of {history.info.steps}"
    if history.outcome in ("broken", "interrupted"):
        return unknown(f"the arm was cut short at {done} ({history.outcome})")
    if stops and not evidence.is_control and history.outcome == "gave-up":
        return passed(f"the job stopped at {done}, as {stops[0]} is expected to make it")
    if history.info.observed and not history.runs:
        return unknown(unseen(history))
    if history.finished and (changed := history.finished.data.get("changed")):
        return unknown(f"{evidence.place('workload.progress')}{changed}")
    if history.outcome != "completed":
        return finished(evidence) or failed(f"the job did not finish: {history.outcome} at {done}")
    ideal, runs = evidence.measures.ideal, _healthy(evidence)
    if ideal is None:
        return unknown("no healthy step to compare the rate with")
    if len(runs) < HEALTHY_STEPS:
        return unknown(
            f"{len(runs)} healthy steps after the last fault, {HEALTHY_STEPS} are needed: "
            "inject earlier, or raise workload.steps"
        )
    tail = _last_of(runs)
    net = busy.net_of_pressure(evidence, ideal, _step_s(history, tail), tail)
    if ideal.step_s / _step_s(history, tail) < HEALTHY_RATE and busy.says_little(evidence, net):
        tail = runs[-STARVED_STEPS:]
    step_s = _step_s(history, tail)
    rate = ideal.step_s / step_s
    witness = (
        f"{done}; the last {len(tail)} healthy steps at {rate:.2f} of the rate of"
        f" {ideal.source}, for their world"
    )
    if rate >= HEALTHY_RATE:
        return _stood_still(evidence, ideal.step_s) or passed(witness)
    return _why_slow(evidence, tail, f"{witness}, {HEALTHY_RATE:.2f} is due", ideal)


def _stood_still(evidence: Evidence, ideal_s: float) -> Finding | None:
    """The finding on a step in which the job stood still for no reason, None if it did not."""
    history, control = evidence.history, evidence.control_history
    usual_s = [ideal_s * STILL, STILL_S]
    if control is not None and not evidence.is_control:
        usual_s += [run.seconds for run in control.runs]
    usual_s += [run.seconds for run in _before(evidence)]
    episodes = evidence.measures.episodes
    hits = [e.injected.time_ns for e in episodes if e.injected]
    hits += [event.time_ns for event in history.log.of(Kind.BUSY_ENDED)]
    for run in history.lineage.values():
        seconds = net_s(history, run)
        generation = history.generation(run.generation)
        first = generation is None or generation.resume_step == run.step - 1
        if first or seconds <= max(usual_s):
            continue
        if any(run.start_ns <= at <= run.end_ns for at in hits):
            continue
        if any(e.lasts_over(run.start_ns, run.end_ns) for e in episodes):
            continue
        still = f"the job stood still for {seconds:.1f} s in step {run.step}, and nobody noticed"
        if others_of(evidence.log) is not None:
            return unknown(f"{TOO_BUSY}{still}, beside other programs")
        return failed(still)
    return None


def _why_slow(evidence: Evidence, tail: list[StepRun], witness: str, ideal: Ideal) -> Finding:
    """Judge a rate that is too low: the machine's doing, too short to judge, or a failure."""
    history, ideal_s = evidence.history, ideal.step_s
    step_s = _step_s(history, tail)
    if (net := busy.net_of_pressure(evidence, ideal, step_s, tail)) is not None:
        if (likely := ideal_s / net.likely_s) >= HEALTHY_RATE and net.may_pass:
            return passed(f"{witness}; it is {likely:.2f} net of {net.why}")
        if (most := ideal_s / net.least_s) >= HEALTHY_RATE:
            return unknown(
                f"{TOO_BUSY}{net.why}: {witness}, and net of that {likely:.2f} to"
                f" {_at_most_all(most)}"
            )
        witness += f" (and net of {net.why} it is {most:.2f} at most)"
    if busy.says_little(evidence, net) and len(tail) < STARVED_STEPS:
        return unknown(
            f"{TOO_BUSY}{witness}; {len(tail)} steps do not tell, which other programs held up:"
            f" {STARVED_STEPS} may, raise workload.steps"
        )
    if not any(episode.injected for episode in evidence.measures.episodes):
        return unknown(
            f"{witness}; but no fault came before it that could be to blame: run it on a quieter"
            " machine, or correct the job, if its steps become longer by themselves"
        )
    before = _last_of(_before(evidence))
    if len(before) >= HEALTHY_STEPS and (own := _step_s(history, before) / step_s) >= HEALTHY_RATE:
        return unknown(
            f"{witness}; but at {own:.2f} of its own before the first fault: run it on a quieter"
            " machine"
        )
    if (seconds := sum(run.seconds for run in tail)) < HEALTHY_S:
        return unknown(
            f"{witness}; but in {seconds:.2f} s in all, too short to tell: raise workload.steps"
        )
    own_s = sum(run.seconds for run in _before(evidence))
    if evidence.control_history is None and own_s < HEALTHY_S:
        return unknown(
            f"{witness}; but that is of {own_s:.2f} s in all, too short to tell: inject later, or"
            " play a control arm (baseline: paired)"
        )
    return failed(witness + busy.unrecorded(evidence))


def _at_most_all(rate: float) -> str:
    """The rate, capped: when pressure explains nearly all of a step, a higher one means nothing."""
    return f"{rate:.2f}" if rate <= 1 else "1.00 or more"


def finished(evidence: Evidence) -> Finding | None:
    """The finding on a job that did not finish although no fault is expected to stop it, else None.
    All other findings then hold only up to where it stopped.
    """
    history = evidence.history
    meant = evidence.expects("fail-stop") or evidence.expects("hang")
    if not history.unfinished or (meant and not evidence.is_control):
        return None
    if history.info.observed and not history.runs:
        return None  # no step was seen; ``progress`` reports that
    observed = history.info.observed
    stopped = (
        f"the job did not finish: {history.outcome} at step {history.committed_step} of"
        f" {history.info.steps}"
    )
    done = f"{stopped}{_reason(history) if observed else ''}"
    if observed and history.finished and history.finished.data.get("miscounted"):
        return unknown(done)  # the harness stopped it, as it cannot see all of it
    control = history if evidence.is_control else evidence.control_history
    if observed and control is not None and control.unfinished:
        alone = "" if evidence.is_control else ", and the control arm did not either"
        return unknown(
            f"{stopped}{alone}: correct the command first, until it ends well without a fault"
            f"{_reason(control)}"
        )
    return failed(done)


def _reason(history: History) -> str:
    return f": {history.finished.data['reason']}" if history.finished else ""


def _step_s(history: History, runs: Sequence[StepRun]) -> float:
    """Median seconds of a step without checkpoints and evaluations (the ideal step has none
    either), scaled to a full world, as a smaller one has more work per step.
    """
    seconds = [net_s(history, run) * run.world / history.info.ranks for run in runs]
    return max(statistics.median(seconds), 1e-9)


def _last_of(runs: Sequence[StepRun]) -> list[StepRun]:
    """The last steps that make up HEALTHY_S, at least HEALTHY_STEPS of them."""
    found: list[StepRun] = []
    for run in reversed(runs):
        if len(found) >= HEALTHY_STEPS and sum(each.seconds for each in found) >= HEALTHY_S:
            break
        found.append(run)
    return found[::-1]


def _healthy(evidence: Evidence) -> list[StepRun]:
    episodes = evidence.measures.episodes
    last = max((e.injected.time_ns for e in episodes if e.injected), default=0)
    return [
        run
        for run in evidence.history.lineage.values()
        if run.start_ns >= last
        and not any(e.lasts_over(run.start_ns, run.end_ns) for e in episodes)
    ]


def _before(evidence: Evidence) -> list[StepRun]:
    """Surviving steps before the first injection, except step 1, which pays for lazy
    initialisation.
    """
    injected = [e.injected.time_ns for e in evidence.measures.episodes if e.injected]
    first = min(injected, default=0)
    return [run for run in evidence.history.lineage.values() if run.end_ns < first and run.step > 1]


def without_need(history: History, generation: Generation) -> str:
    """What was lost up to a generation that has too few ranks, in words, where the spares that were
    promised were enough for it; "" where they were not. One that follows a part of the model takes
    the place of a rank that holds it.
    """
    spares, lost = history.info.spares, _lost(history, generation)
    words = f"after {len(lost)} losses with {spares} spares"
    if not spares:
        return words
    promised = [
        str(event.data["process"])
        for event in history.log.of(Kind.PROCESS_SPAWNED)
        if event.data["role"] == "spare"
    ][:spares]
    part = {  # nothing that was told later helped it
        str(event.data["process"]): int(event.data["shard"])
        for event in history.log.of(Kind.SPARE_PLACED)
        if event.time_ns < generation.started_ns
    }
    placed = bool(part)
    for row in history.generations:
        part |= {name: row.shard_of(rank) for rank, name in enumerate(row.members)}
    for shard in range(history.shards) if placed else ():
        # one that nothing is known of counts everywhere
        of_it = [name for name in lost if part.get(name, shard) == shard]
        if len(of_it) > sum(part.get(name, shard) == shard for name in promised):
            return ""
    return words if len(lost) <= spares else ""


def _lost(history: History, generation: Generation) -> list[str]:
    """Losses up to a generation: members that failed and left, members that had to leave a job that
    started from scratch, and spares that died, or were about to, while waiting.

    In a restart from scratch the first replica has never trained, and spares take the places of
    living members.
    """
    rows = [g for g in history.generations if g.number <= generation.number]
    members = {name for row in rows for name in row.members}
    gone = {
        e.data["process"]
        for e in history.log.of(Kind.PROCESS_EXITED, Kind.FAILURE_DETECTED)
        if e.time_ns < generation.started_ns and not e.data.get("expected")
    }
    gone -= keepers(history.log).keys()
    spares = {name for name in gone if name is not None and name not in members}
    left: list[str] = []
    for old, new in itertools.pairwise(rows):
        departed = set(old.members) - set(new.members)
        left += departed if _begins_anew(history, new) else departed & gone
    return [*spares, *left]


def _begins_anew(history: History, generation: Generation) -> bool:
    """Whether a generation was to start from scratch: nothing had been saved on disk before it.

    Checkpoints that keepers hold do not count, because they may be lost with their node: a
    coordinator that knows of no other plans for a fresh start, even if one is found later.
    """
    remembered = (generation.checkpoint or "").startswith(REMEMBERED)
    if generation.ready_ns is not None and not remembered:
        found = generation.checkpoint is not None
    else:
        found = any(
            e.time_ns < generation.started_ns and e.data.get("place") != PLACE
            for e in history.log.of(Kind.CHECKPOINT_COMMITTED)
        )
    return generation.state == "checkpoint" and not found
