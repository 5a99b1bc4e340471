"""The benchmark of hangs: what it plays, and what it says of event logs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import hangs
from benchmarks.hangs import FAMILIES, PACES, MeasuredHang
from tests.chaos.loading.test_scenarios import loaded
from tests.harness.judge.measure.test_pressure import read
from tests.support.arms import hot_spare
from tests.support.fakes.readings import NS, Load, steady, until
from tests.support.logs import Script
from tests.support.search.simulate import cell_of
from tests.support.search.simulate import play as simulate
from trainchaos.chaos.events.log import Kind, Log
from trainchaos.harness.launchers.sim import Sim


@pytest.mark.parametrize("pace", PACES)
def test_each_seed_meets_all_families_in_an_order_of_its_own(pace: str, tmp_path: Path) -> None:
    orders = set()
    for seed in range(6):
        path = tmp_path / f"{seed}.yaml"
        path.write_text(json.dumps(hangs.scenario(seed, PACES[pace])))
        ((cell,),) = [loaded(path).cells]
        faults = [fault.id for fault in cell.scenario.faults]
        assert sorted(faults) == sorted(family.replace(" ", "-") for family in FAMILIES)
        orders.add(tuple(faults))
    assert len(orders) > 3


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("step_s", [0.05, 1.0])
def test_hangs_are_read_from_the_log(step_s: float, memory: Path) -> None:
    faults = [
        {"id": "stopped", "kind": "process-stop", "target": {"rank": 1}, "at": {"step": 21}},
        {
            "id": "spinning-on-the-host",
            "kind": "rank-hang",
            "params": {"how": "spin", "hold_s": 90},
            "target": {"rank": 2},
            "at": {"step": 35, "phase": "forward"},
        },
    ]
    log = simulate(
        cell_of("hot-spare", faults, steps=45), memory, seed=3, sim=Sim(step_ms=1000 * step_s)
    ).log
    stopped, spins = hangs.found_in(log)
    assert (stopped.family, spins.family) == ("stopped", "spinning on the host")
    for one in (stopped, spins):
        assert one.step_s == pytest.approx(step_s, rel=0.1) and not one.busy
        assert one.bound_s == max(0.6, 8 * one.step_s)
        assert one.detection_s <= one.bound_s and one.recovery_s > one.detection_s
    assert stopped.detection_s < 0.2 < spins.detection_s


def test_the_table_has_a_row_for_each_family_and_pace() -> None:
    def found(family: str, detection_s: float, step_s: float, busy: str = "") -> MeasuredHang:
        return MeasuredHang(
            family=family,
            detection_s=detection_s,
            recovery_s=detection_s + 0.1,
            step_s=step_s,
            busy=busy,
        )

    short = [found(family, 0.5 + 0.05 * n, 0.05) for n in range(6) for family in FAMILIES]
    slow = [found("stopped", 0.1, 1.0), found("stopped", math.inf, 1.2, "hogs")]
    head, _, *rows = hangs.table({"short": short, "long": slow}).splitlines()
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in (head, *rows)]
    assert [row[0] for row in cells[1:]] == [*FAMILIES, "stopped"]
    named = [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]
    assert (
        named[0]["declared after, s"] == "0.625 [0.500, 0.750]" and named[0]["within"] == "3 of 6"
    )
    assert (
        named[4]["bound, s"] == "8.00 to 9.60"
        and named[4]["declared after, s"] == "inf (all: 0.100, inf)"
    )
    assert (named[4]["within"], named[4]["beside others"], named[4]["n"]) == ("1 of 2", "1", "2")


# ---- whether the machine did something else


def silent_for(load: Load, seconds: float = 2.0) -> str:
    """What is said of a silence at the end of the log of ``arms.hot_spare``, whose ranks had this
    of the processors.
    """
    script = hot_spare()
    script.now += int(seconds * NS)
    script.lines[-1].time_ns = script.now
    read(script, load)
    log: Log = script.log()
    end_ns = max(event.time_ns for event in log.of(Kind.PRESSURE_READ))
    return hangs.busy(log, end_ns - int(seconds * NS), end_ns)


def test_ranks_with_processors_of_their_own_were_alone() -> None:
    assert silent_for(steady(0.5, 0.0)) == silent_for(steady(0.0, 0.0)) == ""


def test_ranks_that_wait_for_processors_that_they_do_not_take_from_each_other_were_not_alone() -> (
    None
):
    assert silent_for(steady(0.3, 0.3)).startswith("ranks waited 1.0 s for each second")


def test_a_load_that_began_with_the_silence_is_seen() -> None:
    """Ranks that sleep do not wait for processors: the machine says that somebody did."""
    script = hot_spare()
    began_ns = script.now
    loads = until(began_ns, steady(0.5, 0.0), steady(0.001, 0.0002))
    assert silent_for(loads).startswith("tasks waited for a processor")


def test_a_machine_that_others_used_is_busy_throughout() -> None:
    said = []
    for others in (0.0, 0.68):
        script = Script("hot-spare", arm="faulted")
        script.train(script.steps)
        if others:
            script.orchestrator(Kind.MACHINE_BUSY, others=others, cpus=2)
        log = script.finish().log()
        said.append(hangs.busy(log, log.events[0].time_ns, log.events[-1].time_ns))
    assert said == ["", "other programs used 0.7 processors"]
