"""The choices for a loss or gradient that is not finite: retry, skip the share, roll back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from simulate import cell_of
from test_sim import found, of
from test_skipping import view

from chaos.events import Kind
from recovery.fallback import MAX_SKIPPED_SHARES
from recovery.strategies.drop_replica import DropReplica
from recovery.strategies.hot_spare import HotSpare
from recovery.strategy import ClusterView, Form, GiveUp, Nonfinite, StateFrom

NAN = {
    "id": "nan", "kind": "tensor-corrupt", "params": {"surface": "parameter", "op": "nan"},
    "target": {"rank": 1}, "at": {"step": 33}, "expect": {"detected_by": "nonfinite", "blame": "rank"},
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", [DropReplica, HotSpare])


def seen_by(*samples: tuple[int, ...], before: bool) -> ClusterView:
    """Three ranks, each with the whole model."""
    seen = view(*samples, before=before)
    return replace(seen, processes=tuple(replace(process, shard=0) for process in seen.processes))


def form_of(
    kind: type[DropReplica | HotSpare], nonfinite: Nonfinite, *samples: tuple[int, ...], before: bool
) -> Form:
    decision = kind(nonfinite=nonfinite).on_failure(seen_by(*samples, before=before))
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
    assert (form.state, form.refill, form.skip, form.skip_from) == (StateFrom.PEER, ("w0",), (7, 8, 9), 7)


@KINDS
def test_rollback_goes_to_a_checkpoint_at_once(kind: type[DropReplica | HotSpare]) -> None:
    assert form_of(kind, "rollback", (), before=False).state is StateFrom.CHECKPOINT


@KINDS
def test_where_all_are_to_blame_skipping_is_no_help_either(kind: type[DropReplica | HotSpare]) -> None:
    assert form_of(kind, "skip", (), (), (), before=False).state is StateFrom.CHECKPOINT


@KINDS
def test_a_job_that_skips_again_and_again_is_given_up(kind: type[DropReplica | HotSpare]) -> None:
    seen = seen_by((1, 2), before=True)
    many = tuple(replace(seen.history[0], step=step) for step in range(MAX_SKIPPED_SHARES))
    (action,) = kind(nonfinite="skip").on_failure(replace(seen, history=many)).actions
    assert isinstance(action, GiveUp)
    assert kind(nonfinite="skip").on_failure(replace(seen, history=many[1:])).actions[0] != action


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
