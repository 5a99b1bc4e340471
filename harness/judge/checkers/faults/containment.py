"""Whether non-finite values were contained or had no effect."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence, unknown, verdict_of
from trainchaos.harness.judge.measure.digests import by_shard, diverged, final_digests
from trainchaos.harness.judge.record.episode import Episode
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.split import went_on_with
from trainchaos.harness.judge.results import Finding

STATE = ("parameters", "optimizer")
"""Parts of a state that can hold a planted value and are compared for it."""


def planted_finite(episode: Episode) -> bool:
    """Whether all values that a fault wrote into a tensor were finite, as reported by the rank that
    it hit.
    """
    written = (
        episode.landed.data["evidence"].get("new")
        if episode.landed and episode.landed.data["evidence"]
        else None
    )
    return bool(written) and all(math.isfinite(float(value)) for value in written or ())


def nan_containment(evidence: Evidence) -> Finding:
    """No step was committed with a non-finite loss or gradient norm, and every planted NaN or
    infinity was caught, either itself or through the state that it corrupted. A planted value need
    not be caught if another failure ended its generation, or if it changed nothing: all ranks then
    hold the same state as the control arm, bit for bit.
    """
    problems = []
    idle: list[str] = []
    count = 0
    for run in evidence.history.runs:
        count += len(run.commits)
        losses, norms = run.done.said["loss"], run.done.said["grad_norm"]
        if _all_finite(losses) and _all_finite(norms):
            continue
        for rank, loss, norm in zip(run.done.said["rank"], losses, norms, strict=True):
            for name, value in (("loss", loss), ("grad_norm", norm)):
                missing = value is None and name == "loss"
                if missing or (value is not None and not math.isfinite(float(value))):
                    problems.append(f"rank {rank} committed step {run.step} with {name} {value}")
    caught = [*evidence.log.of(Kind.NONFINITE_CAUGHT), *diverged(evidence.history)]
    for episode in evidence.measures.episodes:
        fault = evidence.fault(episode.fault)
        # tensor-corrupt plants NaN by default
        default = "nan" if episode.kind == "tensor-corrupt" else None
        planted = fault is not None and fault.params.get("op", default) in ("nan", "inf")
        if planted and episode.landed and episode.injected and not problems:
            mine = [event for event in caught if _can_be_of(evidence, episode, event)]
            same = _changed_nothing(evidence, episode)
            if same is not None and not any(event.time_ns < same.time_ns for event in mine):
                idle.append(
                    f"; {episode.fault} changed nothing: after step {same.step} all is as in the"
                    " control arm"
                )
            elif not mine and not _cut_off(evidence, episode):
                problems.append(f"{episode.fault} planted a non-finite value that was not caught")
    if not count:
        return unknown("no step was committed")
    return verdict_of(problems, f"{count} commits finite, {len(caught)} refusals{''.join(idle)}")


def _all_finite(values: Sequence[Any]) -> bool:
    """Whether these are finite numbers, found without a look at each alone."""
    return set(map(type, values)) == {float} and all(map(math.isfinite, values))


def _changed_nothing(evidence: Evidence, episode: Episode) -> Event | None:
    """The last of the first digests in the generation of the injection, if the digests of all
    members equal the control arm's: the planted value is then gone. None: they differ, or cannot be
    compared.
    """
    injected, control, history = episode.injected, evidence.control_history, evidence.history
    if injected is None or control is None or control.info.seed != history.info.seed:
        return None
    taken: dict[int, dict[str, Event]] = {}
    for event in evidence.log.of(Kind.STATE_DIGEST):
        if (
            event.generation == injected.generation
            and event.time_ns > injected.time_ns
            and event.step
        ):
            taken.setdefault(event.step, {})[event.actor] = event
    generation, step = history.generation(injected.generation), min(taken, default=0)
    if generation is None or not step or taken[step].keys() != set(generation.members):
        return None
    theirs = by_shard(final_digests(control).get(step, {}), history.shards)
    for event in taken[step].values():
        others = theirs.get(int(event.data["rank"]) % history.shards, [])
        if not others or any(
            event.data[name] != other.data[name] for name in STATE for other in others
        ):
            return None
    return max(taken[step].values(), key=lambda event: event.time_ns)


def _can_be_of(evidence: Evidence, episode: Episode, event: Event) -> bool:
    """Whether a refusal can be due to an episode: it came after the injection, and blames a process
    that the fault hit and that was still a member.

    A refusal that blames no process counts, because all may be corrupted. So does one that blames
    a process that no fault hit: the value was refused, and ``detection`` judges the blame. A state
    that is refused after the last step counts for all ranks, as all of them roll back.
    """
    if episode.injected is None or event.time_ns < episode.injected.time_ns:
        return False
    generation = evidence.history.generation(event.generation)
    members = generation.members if generation is not None else ()
    there = set(episode.processes) & set(members)
    if event.data.get("what") == "state" and event.generation == episode.injected.generation:
        return True
    if event.kind is Kind.NONFINITE_CAUGHT:
        blamed = {members[rank] for rank in event.data["blamed"] if rank < len(members)}
    else:
        blamed = {event.data["process"]} - {None}
    hit = {
        process
        for other in evidence.measures.episodes
        if other.injected
        for process in other.processes
    }
    return not there or bool(there & blamed) or not blamed & hit


def _cut_off(evidence: Evidence, episode: Episode) -> bool:
    """Whether another failure ended the generation of an injection before its step was committed,
    or before its state was used again. The last step must also have been repeated from an earlier
    one: its state is only checked when the job is done.
    """
    injected, history = episode.injected, evidence.history
    if injected is None:
        return False
    generation, step = injected.generation, injected.step or 0
    if any((run.generation, run.step) == (generation, step) for run in history.runs):
        if went_on_with(history, episode.processes, generation, step):
            return False
        if step == history.info.steps and not _done_again(history, generation, step):
            return False
    return _state_replaced(history, episode, generation, step) or any(
        failure.data["cause"] != "nonfinite" and failure.generation == generation
        for failure in evidence.log.of(Kind.FAILURE_DETECTED)
        if failure.time_ns >= injected.time_ns
    )


def _state_replaced(history: History, episode: Episode, generation: int, step: int) -> bool:
    """Whether the next generation had all its state from a checkpoint of an earlier step, or none
    of the processes hit: the planted value is gone, whoever was blamed.
    """
    after = history.generation(generation + 1)
    if after is None:
        return False
    earlier = after.resume_step is not None and after.resume_step < step
    from_disk = after.state == "checkpoint" and earlier
    return from_disk or not set(episode.processes) & set(after.members)


def _done_again(history: History, generation: int, step: int) -> bool:
    """Whether a later generation, resumed before the job's last step, made that step."""
    run = history.lineage.get(step)
    anew = history.generation(run.generation) if run is not None else None
    if anew is None or anew.number <= generation:
        return False
    return anew.resume_step is not None and anew.resume_step < step
