"""Trials put together: the worst outcome, costs, overhead, and ratios by pairs."""

from __future__ import annotations

import math

from tests.support.pages.sample_comparison import plain_trial as trial
from trainchaos.harness.compare.result.model import OutcomeClass
from trainchaos.harness.compare.result.statistics import EVERY
from trainchaos.harness.compare.result.summary import cells_of, ratios_of, worst_of


def test_the_worst_outcome_stands_and_what_did_not_land_says_nothing() -> None:
    assert worst_of(["masked", "hung", "degraded"]) == "hung"
    assert worst_of(["recovered", "not landed"]) == "recovered"
    assert worst_of(["not landed"]) == "not landed"


def test_a_cell_keeps_every_value_and_counts_never_as_infinite() -> None:
    trials = [
        trial("x", 1, 0.5),
        trial("x", 2, math.inf, "hung"),
        trial("x", 3, None, "not landed"),
    ]
    (cell,) = cells_of(["x"], ["kill"], trials, bare=None, not_offered={})
    assert (cell.n, cell.worst, cell.witness) == (2, "hung", "hung 2")
    assert cell.outcomes == {"recovered": 1, "hung": 1, "not landed": 1}
    assert cell.recovery is not None and cell.recovery.values == [0.5, math.inf]
    assert cell.cost_gpu_hours == math.inf and cell.overhead is None


def test_overhead_is_against_the_bare_loop_of_the_same_seed_and_a_cost_counts_spares() -> None:
    trials = [
        trial("x", 1, 3.6, step_time=0.06, ranks=5),
        trial("none default", 1, math.inf, "hung"),
    ]
    cells = cells_of(
        ["x"],
        ["kill", "save"],
        trials,
        bare="none default",
        not_offered={("x", "save"): "no files"},
    )
    assert cells[0].overhead is not None and round(cells[0].overhead.values[0], 6) == 1.2
    assert cells[0].cost_gpu_hours == 5 * 3.6 / 3600
    assert (cells[1].worst, cells[1].n, cells[1].note) == ("not offered", 0, "no files")


def test_pairs_are_of_one_seed_and_over_all_families_of_one_seed_and_family() -> None:
    trials = [
        trial(label, seed, time * (1 + seed / 100), family=family)
        for label, time in (("ours", 0.5), ("theirs", 5.0))
        for family in ("kill", "hang")
        for seed in (1, 2, 3)
    ]
    trials.append(trial("theirs", 9, 7.0))
    ratios = {(ratio.family, ratio.metric): ratio for ratio in ratios_of(trials, "ours")}
    assert len(ratios) == 7
    kill, every = ratios["kill", "recovery"], ratios[EVERY, "recovery"]
    assert (kill.n, kill.says, kill.interval) == (3, "too few", None)
    assert kill.value is not None and round(kill.value, 6) == 10
    assert (every.n, every.says) == (6, "slower")


def test_a_pair_in_which_only_one_recovers_has_an_infinite_ratio() -> None:
    trials = [trial("ours", seed, 0.5) for seed in range(6)]
    trials += [trial("theirs", seed, math.inf, "hung") for seed in range(6)]
    ratio = next(r for r in ratios_of(trials, "ours") if r.metric == "recovery")
    assert (ratio.value, ratio.says) == (math.inf, "only the other recovers")


def test_what_gave_no_value_is_counted_and_shown() -> None:
    """Of three trials one never stood still: its recovery is no third value, and the table
    says so.
    """
    whole = trial("x", 1, 0.5).model_copy(update={"full_rate": 0.75, "redundancy": 2.0})
    trials = [
        whole,
        trial("x", 2, 0.6),
        trial("x", 3, None, "masked"),
        trial("x", 4, None, "not landed"),
    ]
    (cell,) = cells_of(["x"], ["kill"], trials, bare=None, not_offered={})
    assert cell.recovery is not None and cell.recovery.counted == "2 of 3"
    assert cell.full_rate is not None and (cell.full_rate.values, cell.full_rate.counted) == (
        [0.75],
        "1 of 3",
    )
    assert cell.redundancy is not None and cell.redundancy.median == 2.0
    assert cell.goodput is not None and cell.goodput.counted == "3"


def test_who_kept_the_work_survived_and_what_did_not_land_says_nothing() -> None:
    """Clopper and Pearson's limits for 3 of 4, by tables."""
    ends: tuple[OutcomeClass, ...] = (
        "recovered",
        "rolled back",
        "degraded",
        "started over",
        "not landed",
    )
    trials = [
        trial("x", seed, 1.0, outcome).model_copy(update={"ettr": 0.2 * seed})
        for seed, outcome in enumerate(ends, 1)
    ]
    (cell,) = cells_of(["x"], ["kill"], trials, bare=None, not_offered={})
    assert cell.survival is not None and cell.ettr is not None
    assert (cell.survival.survived, cell.survival.arms, cell.survival.probability) == (3, 4, 0.75)
    assert (round(cell.survival.low, 4), round(cell.survival.high, 4)) == (0.1941, 0.9937)
    assert cell.ettr.median == 0.5 and cell.ettr.n == 4
    (nothing,) = cells_of(["x"], ["kill"], trials[-1:], bare=None, not_offered={})
    assert nothing.survival is None
