"""Whether the result equals the unfaulted run's: bit for bit where promised, else within a band.

The band compares trailing means (window w = max(5, steps / 20)) of the faulted arm's and its
control's losses:

- With control arms of at least two seeds, the largest difference may not exceed the largest
  difference, at any step past the first window, between two control arms of different seeds, and
  the final difference not their largest one in the last quarter of the steps. (A rank argument: a
  run no further from its control than runs with other seeds are from each other cannot be told from
  them.)
- With one seed, the noise sigma of a single loss is taken from the control's successive
  differences, sigma^2 = sum (L[k+1] - L[k])^2 / (2 (n - 1)) (von Neumann et al., "The Mean Square
  Successive Difference", Annals of Mathematical Statistics 12, 1941: insensitive to a slow trend).
  Two independent trailing means differ by sigma sqrt(2/w) in standard deviation; 3 of these are
  allowed at the end and 4 at any step (about 200 looks at 95 %, Bonferroni).

A mean over b samples has 1 / b of their variance. Where a smaller world took batches of b instead
of B samples (``batch: shrink``), the difference has (1 + B / b) / 2 times the variance, and the
band is widened by the root of that.

In every case the losses and states of all steps before the first one with fewer ranks have to be
bit-identical to the control arm's, for any strategy, because up to there gradients were summed in
the same way. An error that is the same on all ranks shows in those steps; after them it shows only
in the band, unless the workload has ``determinism: elastic``, where the number of ranks does not
change any bit.

The band has two sides: a loss that is too good (a sample seen twice, a step done twice) is as
suspicious as one that is too bad.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Literal

from trainchaos.chaos.events.log import Event, Kind, Log
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed, unknown
from trainchaos.harness.judge.measure.digests import by_shard, final_digests, own_parts
from trainchaos.harness.judge.measure.measure import skips_of
from trainchaos.harness.judge.record.history import History
from trainchaos.harness.judge.record.lineage import history_of
from trainchaos.harness.judge.record.split import diverged
from trainchaos.harness.judge.results import Finding

Exactness = Literal["bit for bit", "within the control band", "differs", "not compared"]
DIGESTS = ("parameters", "optimizer", "scheduler")


def loss_equality(evidence: Evidence) -> Finding:
    """Losses and state equal the control arm's: parameters, optimizer, scheduler, and what each
    rank has of its own (buffers, registered objects).

    Bit for bit where the strategy promises it and the world stayed full (or does not matter, with
    ``determinism: elastic``), else within this module's band from the first step with fewer ranks.
    """
    comparison, witness = compare(evidence)
    if comparison == "not compared":
        vacuous = evidence.is_control or evidence.cell.scenario.baseline == "none"
        return passed(f"nothing to check: {witness}") if vacuous else unknown(witness)
    escapes = evidence.expects("sdc-escape")
    if comparison != "bit for bit" and escapes:
        return passed(f"{witness}; {escapes[0]} is expected to escape undetected")
    return failed(witness) if comparison == "differs" else passed(witness)


def compare(evidence: Evidence) -> tuple[Exactness, str]:
    """How the arm's result compares with the control arm's, and the witness for it."""
    if evidence.is_control:
        return "not compared", "this is the control arm"
    history, control = evidence.history, evidence.control_history
    if control is None:
        none = evidence.cell.scenario.baseline == "none"
        why = "the scenario has baseline: none" if none else "the paired control arm is missing"
        return "not compared", why
    if control.info.seed != history.info.seed:
        why = f"the control arm has seed {control.info.seed}, this one {history.info.seed}"
        return "not compared", why
    mine, theirs = _losses(history), _losses(control)
    steps = sorted(mine.keys() & theirs.keys())
    if not steps:
        return "not compared", "the two arms have no committed step in common"
    different = _first_difference(history, control)
    if different is None:
        return "bit for bit", f"bit for bit over {len(steps)} steps"
    smaller = (r.step for r in history.lineage.values() if r.world < history.info.ranks)
    shrunk = None if evidence.elastic else min(smaller, default=None)
    skipped = min(skips_of(history).values(), default=None)
    corrupt, exact = diverged(history), evidence.promises_exact
    why = ""
    if exact and corrupt:
        why = f"gradients of a corrupted state were in the sums until step {corrupt[0].step}"
    elif exact and skipped is not None:
        why = f"samples left out from step {skipped} on"
    elif exact and shrunk is None:
        return "differs", different
    elif exact:
        why = f"the world shrank at step {shrunk}"
    if shrunk is not None and skipped is None and not corrupt:
        early = _first_difference(history, control, before=shrunk)
        if early is not None:
            return "differs", f"{early}, before the world shrank at step {shrunk}"
    words = f"judged by band ({why}), " if why else ""
    return _by_band(evidence, [mine[s] for s in steps], [theirs[s] for s in steps], steps, words)


def _losses(history: History) -> dict[int, float]:
    return {step: run.loss for step, run in history.lineage.items()}


def _first_difference(history: History, control: History, before: float = math.inf) -> str | None:
    """The first loss or digest that is not bit-identical in the steps ``before`` a given one."""
    mine, theirs = _losses(history), _losses(control)
    for step in sorted(step for step in mine.keys() & theirs.keys() if step < before):
        if repr(mine[step]) != repr(theirs[step]):
            return f"loss {mine[step]!r} at step {step}, the control arm had {theirs[step]!r}"
    ours, others = final_digests(history), final_digests(control)
    for step in sorted(step for step in ours.keys() & others.keys() if step < before):
        both = [by_shard(found[step], history.shards) for found in (ours, others)]
        for part, shard in itertools.product(DIGESTS, range(history.shards)):
            if len({e.data[part] for found in both for e in found.get(shard, ())}) > 1:
                return f"{part} differ from the control arm's after step {step}"
        found = _own_difference(history, step, ours[step], others[step])
        if found is not None:
            return found
    return None


def _own_difference(
    history: History, step: int, mine: Mapping[int, Event], theirs: Mapping[int, Event]
) -> str | None:
    """The first part of what a rank has of its own, buffers and registered objects, that is not the
    control arm's, as long as all ranks were there. One that took the place of a lost rank has those
    of the rank whose state it copied: what is not alike on all ranks of the control arm is not
    expected of it.
    """
    if any(run.world < history.info.ranks for run in history.lineage.values() if run.step <= step):
        return None
    strangers = _strangers(history)
    due, held = ({n: own_parts(e) for n, e in found.items()} for found in (theirs, mine))
    common: list[dict[str, str]] = []  # by shard: what is alike on all that hold it
    for shard in range(history.shards):
        parts = [one for rank, one in due.items() if rank % history.shards == shard]
        first = parts[0] if parts else {}
        common.append({k: v for k, v in first.items() if all(o.get(k) == v for o in parts)})
    for rank in sorted(due.keys() & held.keys()):
        stranger, alike = strangers.get(rank, step) < step, common[rank % history.shards]
        for part in sorted(due[rank].keys() | held[rank].keys()):
            if due[rank].get(part) != held[rank].get(part) and (part in alike or not stranger):
                return f"{part} of rank {rank} differ from the control arm's after step {step}"
    return None


def _strangers(history: History) -> dict[int, int]:
    """Ranks that hold what another rank had of its own, each with the step after which they do: one
    that restores what was saved of it later has that back.
    """
    found: dict[int, int] = {}
    ready = sorted(history.log.of(Kind.STATE_READY), key=lambda event: event.generation)
    for event in ready:
        rank, step = event.data["rank"], event.step or 0
        given = event.data["origin"] in ("peer", "live") and not event.data.get("own")
        if given and step:
            found.setdefault(rank, step)
        elif event.data["origin"] != "kept" and step <= found.get(rank, -1):
            del found[rank]
    return found


def _by_band(
    evidence: Evidence, mine: list[float], theirs: list[float], steps: list[int], why: str
) -> tuple[Exactness, str]:
    history = evidence.history
    # the loss of a step whose whole batch was left out is of nothing
    sizes = [max(commit.data["samples"] for commit in history.lineage[s].commits) for s in steps]
    mine, theirs = ([*itertools.compress(losses, sizes)] for losses in (mine, theirs))
    count = len(mine)
    window = max(5, count // 20)
    if count < 2 * window:
        few = f"{count} common steps are too few to smooth over {window}: raise workload.steps"
        return "not compared", few
    ours, others = _smooth(mine, window), _smooth(theirs, window)
    if not all(map(math.isfinite, (*ours, *others))):
        return "differs", "a loss is not finite"
    final, anywhere, source = _band(evidence, theirs, window)
    if (noisier := _more_noise(history)) != 1.0:
        final, anywhere = final * noisier, anywhere * noisier
        source = f"{source}, times {noisier:.3g} for smaller batches"
    gaps = [a - b for a, b in zip(ours, others, strict=True)]
    widest = max(gaps, key=abs)
    witness = (
        f"{why}final smoothed loss {gaps[-1]:+.4g} (band {final:.3g}), largest difference"
        f" {widest:+.4g} (band {anywhere:.3g}) over {count} steps; band from {source}"
    )
    if abs(gaps[-1]) > final or abs(widest) > anywhere:
        return "differs", f"{'too good' if widest < 0 else 'too bad'}: {witness}"
    return "within the control band", witness


def _more_noise(history: History) -> float:
    """By how much the difference of two arms' losses is noisier, since one had smaller batches.

    The variance of a batch's mean loss goes with 1 / its samples. Of two arms with B samples it is
    2 / B, and where one has b it is 1 / B + 1 / b.
    """
    full = history.info.global_batch
    taken = [run.commits[0].data["samples"] for run in history.lineage.values() if run.commits]
    least = min((samples for samples in taken if samples), default=full)
    return math.sqrt((1 + full / least) / 2) if least < full else 1.0


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing means over full windows, from running sums."""
    sums = [0.0, *itertools.accumulate(values)]
    return [(last - first) / window for first, last in zip(sums, sums[window:], strict=False)]


def _band(evidence: Evidence, control: Sequence[float], window: int) -> tuple[float, float, str]:
    """Largest allowed difference of smoothed losses, at the end and anywhere, and how it was
    derived. Found once for all arms that are compared with these controls over so many steps.
    """
    steps, controls = len(control), evidence.controls
    name = f"band over {steps} steps of {[id(log) for log in controls]}"
    seeds = controls[0].once(name, lambda _: _of_seeds(controls, steps, window)) if controls else ()
    if len(seeds) > 1:
        gaps = [max(losses) - min(losses) for losses in zip(*seeds, strict=True)]
        source = f"control arms of {len(seeds)} seeds"
        return max(gaps[-max(1, steps // 4) :]), max(gaps), source
    squares = math.fsum((b - a) ** 2 for a, b in itertools.pairwise(control))
    spread = math.sqrt(squares / (2 * (steps - 1))) * math.sqrt(2 / window)
    return 3 * spread, 4 * spread, "the control arm's step-to-step noise"


def _of_seeds(controls: Sequence[Log], steps: int, window: int) -> Sequence[Sequence[float]]:
    """The smoothed losses of one control arm of each seed, where they are finite."""
    curves: dict[int, list[float]] = {}
    for history in map(history_of, controls):
        losses = [run.loss for run in history.lineage.values()][:steps]
        if len(losses) == steps and all(map(math.isfinite, losses)):
            curves.setdefault(history.info.seed, _smooth(losses, window))
    return [*curves.values()]
