"""The simulation against the formulas wherever both hold, and where only it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.projection import closed, simulate
from trainchaos.harness.projection.laws import Duration, Law, Trace, Weibull
from trainchaos.harness.projection.simulate import Job, Lemons, Outcome, Slow

TRIALS = 200
ERRORS = 4.5
"""Standard errors: chance exceeds them once in 150,000 comparisons, and the seed is fixed."""


def job(law: Law, **changed: Any) -> Job:
    """Checkpoint-restart of 10 nodes, whose recovery takes no time."""
    known: dict[str, Any] = {
        "nodes": 10,
        "between": law,
        "rollback": True,
        "segment_s": 30.0,
        "save_s": 1.0,
        "step_s": 1.0,
        "restart_s": 0.0,
        "stall": Duration(median_s=0.0),
    }
    return Job(**(known | changed))


def played(one: Job, failures: int = 1000, trials: int = TRIALS) -> Outcome:
    """For about so many failures."""
    random = np.random.default_rng(7)
    return simulate.simulate(one, failures * one.between.mean_s, trials, random)


def same(outcome: Outcome, share: float) -> bool:
    """Whether the mean goodput is that of a formula, within the error of the trials."""
    found = outcome.goodput
    return abs(found.mean() - share) < ERRORS * found.std(ddof=1) / len(found) ** 0.5 + 1e-4


@pytest.mark.parametrize(
    ("tau", "delta", "restart", "down", "mtbf"),
    [(117, 5, 10, 0, 1440), (57, 5, 10, 0, 360), (30, 1, 5, 0, 180), (30, 1, 0, 5, 180)],
)
def test_a_constant_rate(
    tau: float, delta: float, restart: float, down: float, mtbf: float
) -> None:
    changed = {
        "segment_s": tau,
        "save_s": delta,
        "restart_s": restart,
        "stall": Duration(median_s=down),
    }
    outcome = played(job(Weibull(mtbf), **changed))
    assert same(outcome, closed.goodput(tau, delta, restart, down, mtbf))


@pytest.mark.parametrize("shape", [0.5, 0.78, 1.5])
def test_any_shape(shape: float) -> None:
    law = Weibull(180.0, shape)
    outcome = played(job(law, stall=Duration(median_s=5.0)))
    assert same(outcome, closed.goodput_of_law(law, 30.0, 1.0, 5.0))


def test_recoveries_that_vary_cost_their_mean() -> None:
    stall = Duration(median_s=5.0, sigma=1.0)
    outcome = played(job(Weibull(180.0), stall=stall))
    assert same(outcome, closed.goodput(30.0, 1.0, 0.0, stall.mean_s, 180.0))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("spares", [0, 2])
@pytest.mark.parametrize("sigma", [0.0, 0.8])
def test_nodes_that_are_repaired_are_missing_as_erlang_says(spares: int, sigma: float) -> None:
    repair = Duration(median_s=400.0, sigma=sigma)
    changed = {"rollback": False, "save_s": 0.0, "nodes": 1000}
    one = job(Weibull(300.0), spares=spares, repair=repair, **changed)
    going = closed.goodput_of_law(one.between, one.step_s, 0.0, 0.0)
    gone = closed.missing_nodes(spares, repair.mean_s / 300.0) / 1000
    assert same(played(one), going * (1.0 - gone))


@pytest.mark.slow
def test_a_replica_leaves_as_a_whole() -> None:
    changed = {"rollback": False, "save_s": 0.0, "nodes": 64, "spares": 0}
    repair = Duration(median_s=60.0)
    one, eight = (
        played(job(Weibull(3000.0), replica_nodes=n, repair=repair, **changed)).lost_s["reduced"]
        for n in (1, 8)
    )
    assert eight.mean() / one.mean() == pytest.approx(8.0, rel=0.02)


def test_a_job_without_any_node_has_none_that_fails() -> None:
    """Of one node and no spare: it stands still during each repair, whatever it does with fewer."""
    repair = Duration(median_s=400.0)
    changed = {"nodes": 1, "spares": 0, "repair": repair}
    outcome = played(job(Weibull(180.0), **changed))
    assert same(outcome, closed.goodput(30.0, 1.0, 0.0, 400.0, 180.0))
    assert (outcome.failures <= outcome.horizon_s / 400.0 + 1).all()


@pytest.mark.parametrize("wall", [False, True])
def test_no_more_nodes_are_in_repair_than_there_are(wall: bool) -> None:
    """Of three and a spare a failure by the clock takes five, as do failures during repairs."""
    several = (0.0, 0.0, 0.0, 0.0, 1.0)
    changed = {"nodes": 3, "spares": 1, "several": several, "wall": wall}
    outcome = played(job(Weibull(20.0), repair=Duration(median_s=400.0), **changed))
    assert (outcome.nodes_lost <= 4 * (outcome.horizon_s / 400.0 + 1)).all()
    assert (outcome.nodes_lost >= 4 * (outcome.horizon_s / 600.0 - 1)).all()


def test_several_nodes_at_once_are_one_failure() -> None:
    outcome = played(job(Weibull(180.0), several=(0.5, 0.0, 0.5)))
    assert same(outcome, closed.goodput(30.0, 1.0, 0.0, 0.0, 180.0))
    share = outcome.nodes_lost.sum() / outcome.failures.sum()
    assert share == pytest.approx(2.0, rel=0.01)


def test_failures_during_recoveries_cost_more() -> None:
    stall = Duration(median_s=60.0)
    running = played(job(Weibull(180.0), stall=stall)).goodput.mean()
    always = played(job(Weibull(180.0), stall=stall, wall=True)).goodput.mean()
    assert always < running - 0.01


@pytest.mark.parametrize(
    ("restart_s", "useful_s"),
    [
        (45.0, 60.0 + 9 * 12.0),  # 15 s of each minute but the first are left, 12 in whole segments
        (70.0, 60.0),  # which no restart after the first minute comes to the end of
    ],
)
def test_a_restart_that_fails_begins_anew(restart_s: float, useful_s: float) -> None:
    """A failure each minute that the job runs, for ten of them; the last is over with the time."""
    one = job(Trace([60.0]), restart_s=restart_s, segment_s=4.0, save_s=0.0)
    outcome = simulate.simulate(one, 600.0, 3, np.random.default_rng(1))
    last_s = 3.0 if restart_s < 60.0 else 0.0  # begun, and not lost any more
    assert outcome.useful_s == pytest.approx(np.full(3, useful_s + last_s))
    assert outcome.lost_s["restart"] == pytest.approx(np.full(3, 9 * min(60.0, restart_s)))
    assert (outcome.failures == 9).all()


@pytest.mark.parametrize(
    ("wall", "stall_s", "failures", "useful_s"),
    [
        (True, 20.0, 9, 60.0 + 9 * 40.0),  # at 60, 120, ... 540 s
        (False, 20.0, 7, 60.0 + 6 * 60.0 + 40.0),  # at 60, 140, ... 540 s
        (True, 150.0, 4, 60.0),  # at 60, 210, 360 and 510 s, as each recovery ends
        (False, 150.0, 3, 180.0),  # at 60, 270 and 480 s
    ],
)
def test_failures_come_by_the_clock_of_the_wall_or_of_the_job(
    wall: bool, stall_s: float, failures: int, useful_s: float
) -> None:
    """One each minute; those that come during a recovery are one, as it ends."""
    stall = Duration(median_s=stall_s)
    one = job(Trace([60.0]), wall=wall, stall=stall, segment_s=1.0, save_s=0.0)
    outcome = simulate.simulate(one, 600.0, 3, np.random.default_rng(1))
    assert (outcome.failures == failures).all()
    assert outcome.useful_s == pytest.approx(np.full(3, useful_s))
    assert outcome.lost_s["stall"] == pytest.approx(np.full(3, 600.0 - useful_s))


@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("wall", [True, False])
def test_all_time_is_in_one_class(rollback: bool, wall: bool) -> None:
    changed = {
        "rollback": rollback,
        "wall": wall,
        "spares": 1,
        "lemons": Lemons(share=0.4, times=5.0, quarantine=3),
        "slow": Slow(mean_s=300.0, factor=1.5, found_s=40.0),
        "several": (0.9, 0.1),
        "restart_s": 20.0,
        "repair": Duration(median_s=90.0, sigma=1.0),
        "stall": Duration(median_s=7.0, sigma=0.5),
    }
    outcome = played(job(Trace([5.0, 50.0, 500.0]), **changed), failures=200)
    total = outcome.useful_s + sum(outcome.lost_s.values())
    assert total == pytest.approx(np.full(TRIALS, outcome.horizon_s), rel=1e-9)
    assert (outcome.useful_s > 0).all()
    assert all((times >= 0).all() for times in outcome.lost_s.values())


def test_one_seed_is_one_result() -> None:
    first, second = (played(job(Weibull(180.0)), failures=50).goodput for _ in range(2))
    assert (first == second).all()


def test_more_events_than_can_be_played_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate, "MOST_EVENTS", 10)
    with pytest.raises(ScenarioError, match="more than 10 failures"):
        played(job(Weibull(180.0)), failures=50, trials=2)
