"""The choices for a loss or gradient that is not finite: retry, skip the share, roll back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.sim.test_sim import found, of
from tests.recovery.supervise.test_excluded_samples import view
from tests.support.search.simulate import cell_of
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.policy import fallback
from trainchaos.recovery.policy.strategies.drop_replica import DropReplica
from trainchaos.recovery.policy.strategies.hot_spare import HotSpare
from trainchaos.recovery.policy.strategy import (
    Cause,
    ClusterView,
    Failure,
    Form,
    GiveUp,
    Nonfinite,
    StateFrom,
)

NAN = {
    "id": "nan",
    "kind": "tensor-corrupt",
    "params": {"surface": "parameter", "op": "nan"},
    "target": {"rank": 1},
    "at": {"step": 33},
    "expect": {"detected_by": "nonfinite", "blame": "rank"},
}
KINDS = pytest.mark.parametrize("kind", [DropReplica, HotSpare])


def form_of(
    kind: type[DropReplica | HotSpare],
    nonfinite: Nonfinite,
    *samples: tuple[int, ...],
    before: bool,
) -> Form:
    decision = kind(nonfinite=nonfinite).on_failure(view(*samples, before=before))
    (form,) = [action for action in decision.actions if isinstance(action, Form)]
    return form


@KINDS
def test_retry_gives_the_blamed_a_peers_state_and_leaves_nothing_out(
    kind: type[DropReplica | HotSpare],
) -> None:
    form = form_of(kind, "retry", (), before=False)
    assert (form.state, form.refill, form.skip) == (StateFrom.PEER, ("w0",), ())


@KINDS
def test_skip_leaves_out_the_share_of_the_blamed_and_gives_it_a_peers_state(
    kind: type[DropReplica | HotSpare],
) -> None:
    form = form_of(kind, "skip", (7, 8, 9), before=False)
    assert (form.state, form.refill, form.skip, form.skip_from) == (
        StateFrom.PEER,
        ("w0",),
        (7, 8, 9),
        7,
    )


@KINDS
def test_rollback_goes_to_a_checkpoint_at_once(kind: type[DropReplica | HotSpare]) -> None:
    assert form_of(kind, "rollback", (), before=False).state is StateFrom.CHECKPOINT


@pytest.mark.parametrize("nonfinite", ["retry", "skip"])
@KINDS
def test_what_the_state_holds_already_sends_all_back_to_a_checkpoint(
    kind: type[DropReplica | HotSpare], nonfinite: Nonfinite
) -> None:
    seen = view((), before=False)
    held = replace(seen, failures=tuple(replace(f, applied=True) for f in seen.failures))
    (form,) = [a for a in kind(nonfinite=nonfinite).on_failure(held).actions if isinstance(a, Form)]
    assert form.state is StateFrom.CHECKPOINT


@KINDS
def test_where_all_are_to_blame_skipping_is_no_help_either(
    kind: type[DropReplica | HotSpare],
) -> None:
    assert form_of(kind, "skip", (), (), (), before=False).state is StateFrom.CHECKPOINT


def before(seen: ClusterView, *moments: tuple[int, int], answer: str) -> ClusterView:
    """The same job, in which all ranks were to blame at these generations and steps, and what
    answered it.
    """
    blamed = [
        Failure(process=p.name, rank=p.rank, cause=Cause.NONFINITE, step=0, time_s=0.0)
        for p in seen.processes
    ]
    history = [
        replace(f, generation=g, step=step, answer=answer) for g, step in moments for f in blamed
    ]
    return replace(seen, history=tuple(history))


@KINDS
def test_a_job_that_skips_again_and_again_is_given_up(kind: type[DropReplica | HotSpare]) -> None:
    """Shares are counted, not ranks; those of long ago and what was answered otherwise do not
    count.
    """
    now = 2 * fallback.SKIP_WINDOW_STEPS
    seen = view((1, 2), before=False)
    seen = replace(seen, failures=tuple(replace(f, step=now) for f in seen.failures))
    oldest, most = now - fallback.SKIP_WINDOW_STEPS, fallback.MAX_SKIPPED_SHARES
    many = [(n, oldest + n) for n in range(1, most + 1)]
    decide = kind(nonfinite="skip").on_failure
    (action,) = decide(before(seen, *many, answer="skip")).actions
    assert isinstance(action, GiveUp)
    for other in (
        before(seen, *many[1:], answer="skip"),
        before(seen, *many, answer="refill"),
        before(seen, *many[1:], (17, now - fallback.SKIP_WINDOW_STEPS), answer="skip"),
    ):
        assert decide(other).actions[0] != action


@KINDS
@pytest.mark.parametrize("nonfinite", ["retry", "rollback"])
def test_the_third_time_at_one_step_the_job_ends_however_many_ranks_are_to_blame(
    kind: type[DropReplica | HotSpare], nonfinite: Nonfinite
) -> None:
    decide = kind(nonfinite=nonfinite).on_failure
    for seen in (view((), (), (), before=False), view((), before=False)):
        once, twice = (
            before(seen, *[(n, 7) for n in range(1, times + 1)], answer="rollback")
            for times in (1, 2)
        )
        if nonfinite == "rollback" or len(seen.failures) == 3:
            assert [a.state for a in decide(once).actions if isinstance(a, Form)] == [
                StateFrom.CHECKPOINT
            ]
            assert decide(twice).actions == (GiveUp(),)
            assert "7 is non-finite again after 2 rollbacks" in decide(twice).reason
        refilled = before(seen, (1, 7), (2, 7), (3, 7), answer="refill")
        elsewhere = before(seen, (1, 6), (2, 5), (3, 4), answer="rollback")
        assert not any(
            isinstance(a, GiveUp) for other in (refilled, elsewhere) for a in decide(other).actions
        )


@KINDS
def test_the_reason_says_what_was_looked_at(kind: type[DropReplica | HotSpare]) -> None:
    unexamined = kind(nonfinite="skip").on_failure(view((7, 8), before=False)).reason
    assert "share of w0 (samples 7, 8)" in unexamined and "whoever" not in unexamined
    traced = kind(nonfinite="retry").on_failure(view((7,), before=True)).reason
    assert "sample 7 non-finite whoever computes them" in traced


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "all holders"])
@pytest.mark.parametrize("strategy", ["drop-replica", "hot-spare"])
def test_a_share_is_left_out_of_a_sharded_job_too(strategy: str, layout: str, memory: Path) -> None:
    """Whoever is to blame copies the state of somebody who holds the same shard, or keeps
    its own.
    """
    parallelism = "fsdp" if layout == "fsdp" else {"hsdp": {"replicas": 2, "shards": 2}}
    fault = {**NAN, "params": {"surface": "gradient", "op": "nan"}}
    if layout == "all holders":
        fault |= {"target": {"select": {"count": 2}, "exclude": {"ranks": [0, 2]}}}
    recovery = {"strategy": strategy, "params": {"nonfinite": "skip"}}
    faulted, problems = found(cell_of(recovery, [fault], parallelism=parallelism), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    (skipped,) = of(faulted, Kind.SAMPLES_SKIPPED)
    shares = 2 if layout == "all holders" else 1
    assert len(skipped.data["samples"]) == 6 * shares
    second = of(faulted, Kind.GENERATION_STARTED)[1]
    assert second.data["cause"] == "skip"
    assert len(second.data["sources"]) == (1 if layout == "hsdp" else 0)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("nonfinite", ["retry", "skip", "rollback"])
@pytest.mark.parametrize("strategy", ["drop-replica", "hot-spare"])
def test_a_simulated_job_does_as_it_is_told(strategy: str, nonfinite: str, memory: Path) -> None:
    recovery = {"strategy": strategy, "params": {"nonfinite": nonfinite}}
    faulted, problems = found(cell_of(recovery, [NAN]), memory, 3)
    assert (faulted.outcome, problems) == ("completed", {})
    skipped = [event.data["samples"] for event in of(faulted, Kind.SAMPLES_SKIPPED)]
    assert [len(samples) for samples in skipped] == ([6] if nonfinite == "skip" else [])
    second = of(faulted, Kind.GENERATION_READY)[1]
    restored = ("step-00000030", 30) if nonfinite == "rollback" else (None, 32)
    assert (second.data["checkpoint"], second.step) == restored
