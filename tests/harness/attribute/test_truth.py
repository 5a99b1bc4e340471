"""Every kind of fault has a truth, and every truth says something."""

from __future__ import annotations

import pytest

from trainchaos.harness.attribute.exam import VARIANTS, variants_of
from trainchaos.harness.attribute.truth import TRUTHS, NoTruth, truth_of
from trainchaos.harness.explain.diagnosis import CauseClass
from trainchaos.harness.fuzz.play.play import kinds

KINDS = sorted(kinds())


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_fault_has_a_truth(kind: str) -> None:
    for variant in variants_of(kind):
        truth = truth_of(kind, variant.params, variant.at or {"step": 25})
        assert truth.causes and truth.layers and truth.places and truth.actions


@pytest.mark.parametrize("name", sorted(TRUTHS))
def test_a_truth_with_several_answers_says_why(name: str) -> None:
    truth = TRUTHS[name]
    assert name.partition(":")[0] in KINDS
    if len(truth.causes) > 1 or len(truth.places) > 1 or truth.trace != "events":
        assert truth.why or name in ("io-slow", "health-event"), name


def test_each_class_of_cause_is_the_most_exact_one_of_a_fault() -> None:
    assert {truth.causes[0] for truth in TRUTHS.values()} == set(CauseClass)


def test_variants_are_of_kinds_that_exist() -> None:
    assert set(VARIANTS) <= set(KINDS)


def test_a_new_kind_without_a_truth_is_refused() -> None:
    with pytest.raises(NoTruth, match="late-kill") as caught:
        truth_of("late-kill", {}, {"step": 1})
    assert caught.value.exit_code == 2


def test_parameters_decide_where_they_make_a_difference() -> None:
    at = {"step": 25}
    assert truth_of("tensor-corrupt", {}, at).causes == (CauseClass.NONFINITE,)
    flipped = {"surface": "parameter", "op": "bitflip"}
    assert truth_of("tensor-corrupt", flipped, at).causes == (CauseClass.SILENT_CORRUPTION,)
    assert truth_of("tensor-corrupt", {"op": "stale"}, at).trace == "values"
    assert truth_of("store-kill", {}, at).trace == "none"
    assert truth_of("store-kill", {}, {"event": "regroup"}).trace == "events"
    hang = truth_of("rank-hang", {}, {"step": 25, "phase": "backward"})
    assert CauseClass.DATA not in hang.causes
    assert CauseClass.DATA in truth_of("rank-hang", {}, {"step": 25, "phase": "data"}).causes
