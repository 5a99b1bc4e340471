"""Whether the job was in steady state before the first fault, made progress to its end, and was
there as fast as before.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.scenario.steady import SteadyRule, parse_steady
from trainchaos.harness.judge.evidence.evidence import (
    Evidence,
    failed,
    passed,
    some,
    unknown,
    verdict_of,
)
from trainchaos.harness.judge.measure.partition import Ideal, net_s
from trainchaos.harness.judge.measure.pressure import (
    TOO_BUSY,
    NetStepTime,
    net_of_pressure,
    others_of,
)
from trainchaos.harness.judge.record.history import NS, History, StepRun
from trainchaos.harness.judge.record.observed import unseen
from trainchaos.harness.judge.results import Finding

STILL_S, STILL = 10.0, 20.0
"""A step that took so long, and so many times as long as usual, is a standstill."""
STARVED_STEPS = 20  # of ranks that other programs hold up: one step differs much from the next
HEALTHY_STEPS = 5
HEALTHY_S = 1.0
HEALTHY_RATE = 0.5


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
    if history.cut_short:
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
    step_s = _step_s(history, tail)
    if ideal.step_s / step_s < HEALTHY_RATE:
        net = net_of_pressure(history, ideal, step_s, tail)
        if _says_little(evidence, net):
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
    usual_s = [ideal_s * STILL, STILL_S, *(run.seconds for run in _before(evidence))]
    if control is not None and not evidence.is_control:
        usual_s += [run.seconds for run in control.runs]
    episodes = evidence.measures.episodes
    excused = [e.injected.time_ns for e in episodes if e.injected]
    excused += [event.time_ns for event in history.log.of(Kind.BUSY_ENDED)]
    for run in history.lineage.values():
        seconds, generation = net_s(history, run), history.generation(run.generation)
        if (
            seconds <= max(usual_s)
            or generation is None
            or generation.resume_step == run.step - 1
            or any(run.start_ns <= at <= run.end_ns for at in excused)
            or any(e.lasts_over(run.start_ns, run.end_ns) for e in episodes)
        ):
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
    if (net := net_of_pressure(history, ideal, step_s, tail)) is not None:
        likely, most = ideal_s / net.likely_s, ideal_s / net.least_s
        if likely >= HEALTHY_RATE and net.may_pass:
            return passed(f"{witness}; it is {likely:.2f} net of {net.why}")
        if most >= HEALTHY_RATE:
            # when pressure explains nearly all of a step, a higher rate means nothing
            high = f"{most:.2f}" if most <= 1 else "1.00 or more"
            return unknown(
                f"{TOO_BUSY}{net.why}: {witness}, and net of that {likely:.2f} to {high}"
            )
        witness += f" (and net of {net.why} it is {most:.2f} at most)"
    if _says_little(evidence, net) and len(tail) < STARVED_STEPS:
        return unknown(
            f"{TOO_BUSY}{witness}; {len(tail)} steps do not tell, which other programs held up:"
            f" {STARVED_STEPS} may, raise workload.steps"
        )
    if not any(episode.injected for episode in evidence.measures.episodes):
        return unknown(
            f"{witness}; but no fault came before it that could be to blame: run it on a quieter"
            " machine, or correct the job, if its steps become longer by themselves"
        )
    early = _before(evidence)
    before = _last_of(early)
    if len(before) >= HEALTHY_STEPS and (own := _step_s(history, before) / step_s) >= HEALTHY_RATE:
        return unknown(
            f"{witness}; but at {own:.2f} of its own before the first fault: run it on a quieter"
            " machine"
        )
    if (seconds := sum(run.seconds for run in tail)) < HEALTHY_S:
        return unknown(
            f"{witness}; but in {seconds:.2f} s in all, too short to tell: raise workload.steps"
        )
    own_s = sum(run.seconds for run in early)
    if evidence.control_history is None and own_s < HEALTHY_S:
        return unknown(
            f"{witness}; but that is of {own_s:.2f} s in all, too short to tell: inject later, or"
            " play a control arm (baseline: paired)"
        )
    known = evidence.log.first(Kind.PRESSURE_READ) is not None
    return failed(witness + "; how busy its machines were is not recorded" * (not known))


def _says_little(evidence: Evidence, net: NetStepTime | None) -> bool:
    """Whether other programs used much of the machine, and how long the ranks waited is unknown, or
    was several times their work: one step then differs much from the next.
    """
    return (net is None or net.starved) and others_of(evidence.log) is not None


def finished(evidence: Evidence) -> Finding | None:
    """The finding on a job that did not finish although no fault is expected to stop it, else None.
    All other findings then hold only up to where it stopped.
    """
    history = evidence.history
    meant = evidence.expects("fail-stop") or evidence.expects("hang")
    if not history.unfinished or (meant and not evidence.is_control):
        return None
    stopped = (
        f"the job did not finish: {history.outcome} at step {history.committed_step} of"
        f" {history.info.steps}"
    )
    if not history.info.observed:
        return failed(stopped)
    if not history.runs:
        return None  # no step was seen; ``progress`` reports that
    done = f"{stopped}{_reason(history)}"
    if history.finished and history.finished.data.get("miscounted"):
        return unknown(done)  # the harness stopped it, as it cannot see all of it
    control = history if evidence.is_control else evidence.control_history
    if control is not None and control.unfinished:
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
    first = evidence.history.first_hit_ns or 0
    return [run for run in evidence.history.lineage.values() if run.end_ns < first and run.step > 1]


def steady_state(evidence: Evidence) -> Finding:
    """Every check of ``steady_state`` held before the first fault was injected."""
    history = evidence.history
    until_ns = history.end_ns if history.first_hit_ns is None else history.first_hit_ns
    held, missing = [], []
    for check in evidence.cell.scenario.steady_state:
        rule = parse_steady(check.check)
        seen = _seen(rule, history, until_ns)
        if seen is not None and rule.holds(seen):
            held.append(f"{rule.text}: {seen:.3g}")
        else:
            value = "there was nothing to measure it by" if seen is None else f"it was {seen:.3g}"
            missing.append(f"never reached before the first fault: {rule.text} ({value})")
    return verdict_of([], some(held), missing)


def _seen(rule: SteadyRule, history: History, until_ns: int) -> float | None:
    ready = [g for g in history.generations if g.ready_ns is not None and g.ready_ns <= until_ns]
    if not ready:
        return None
    began_ns = min(g.ready_ns or 0 for g in ready)
    if rule.within_s is not None:
        until_ns = min(until_ns, began_ns + int(rule.within_s * NS))
    runs = [
        run for run in history.runs if run.committed_ns is not None and run.committed_ns <= until_ns
    ]
    if rule.name == "committed_steps":
        return float(len({run.step for run in runs}))
    if rule.name == "healthy_replicas":
        newest = max(ready, key=lambda g: g.number)
        return float(newest.world // newest.shards)
    times = [run.seconds for run in sorted(runs, key=lambda run: run.end_ns)][-(rule.over or 0) :]
    if len(times) < (rule.over or 0) or statistics.fmean(times) <= 0:
        return None
    return statistics.pstdev(times) / statistics.fmean(times)
