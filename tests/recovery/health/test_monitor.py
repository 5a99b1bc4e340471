"""The monitor: period, windows, sources that fail, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainchaos.recovery.health.monitor import PERIOD_S, Monitor
from trainchaos.recovery.health.readings.reading import JOB, Place, Problem, Reading
from trainchaos.recovery.health.readings.reports import ReportFile
from trainchaos.recovery.health.sources.host import HostSource
from trainchaos.recovery.health.sources.job import JobSource
from trainchaos.recovery.health.sources.reported import ReportedSource

STEP_S = 0.04
MOST_OF_STEP = 1e-3


class Broken:
    """A source of somebody else's."""

    name = "broken"

    def read(self, now_s: float) -> Sequence[Reading]:
        """Raises what nobody expects."""
        raise RuntimeError("it broke")

    def problems(self) -> Sequence[Problem]:
        """Never reached."""
        return []


def test_sources_are_read_once_in_a_period() -> None:
    job = JobSource()
    monitor = Monitor(sources=[job], period_s=2.0)
    found = []
    for now_s in (0.0, 0.5, 1.9, 2.0, 2.1, 1.0, 1.5, 3.0):
        job.feed(0, "loss", now_s, "1", now_s)
        found.append(len(monitor.poll(now_s)))
    # At 1.0 the clock had been set back: a read is due, and the next 2 s later.
    assert found == [1, 0, 0, 3, 0, 2, 0, 2]
    assert monitor.cost.reads == 4


def test_windows_are_bounded_and_hold_numbers_only() -> None:
    job = JobSource()
    monitor = Monitor(sources=[job], window=3, most_series=2)
    for i, value in enumerate((1.0, math.nan, 2.0, math.inf, 3.0, 4.0)):
        job.feed(0, "loss", value, "1", float(i))
    job.feed(1, "loss", 7.0, "1", 9.0)
    for rank in range(2, 50):
        job.feed(rank, "loss", 0.0, "1", 9.0)
    assert len(monitor.poll(0.0)) == 55, "all are passed on"
    assert [one.value for one in monitor.series(Place(0), "loss")] == [2.0, 3.0, 4.0]
    latest = monitor.latest("loss")
    assert {where.rank: one.value for where, one in latest.items()} == {0: 4.0, 1: 7.0}
    assert monitor.series(JOB, "loss") == ()
    assert [one.metric for one in monitor.problems()] == ["series"]


def test_a_source_that_raises_does_not_stop_the_others() -> None:
    job = JobSource()
    monitor = Monitor(sources=[Broken(), job], period_s=1.0)
    for now_s in (0.0, 1.0, 2.0):
        job.feed(0, "loss", 1.0, "1", now_s)
        assert len(monitor.poll(now_s)) == 1
    (problem,) = monitor.problems()
    assert (problem.metric, problem.why) == ("broken", "RuntimeError: it broke")
    assert monitor.problems() == []


@pytest.mark.parametrize(("period_s", "window"), [(0.0, 1), (-1.0, 1), (math.nan, 1), (1.0, 0)])
def test_nonsense_is_refused(period_s: float, window: int) -> None:
    with pytest.raises(ValueError, match="a period"):
        Monitor(sources=[], period_s=period_s, window=window)


def test_reading_host_job_and_reports_costs_less_than_a_thousandth_of_a_step(
    tmp_path: Path,
) -> None:
    """Of a step of 40 ms at the default period, with what 8 ranks say in it; the best of some
    reads, as others use this machine's processors too.
    """
    job = JobSource()
    sources = [
        HostSource(disks={"data": tmp_path}),
        job,
        ReportedSource(ReportFile(tmp_path / "h")),
    ]
    monitor = Monitor(sources=sources)
    step = {
        "samples": 8,
        "loss": 1.0,
        "grad_norm": 1.0,
        "seconds": dict.fromkeys(("data", "forward", "backward", "collective", "optimizer"), 0.01),
    }
    took = []
    for second in range(40):
        for number in range(25):
            for rank in range(8):
                at_s = second + number * STEP_S
                job.committed({**step, "rank": rank}, 25 * second + number, at_s)
        before = dict(monitor.cost.by_source)
        monitor.poll(float(second))
        after = monitor.cost.by_source
        took.append({name: after[name] - before.get(name, 0.0) for name in after})
    best_s = min(sum(one.values()) for one in took)
    in_a_step = best_s * STEP_S / PERIOD_S
    print(f"{1e6 * best_s:.0f} us a read, {in_a_step / STEP_S:.3%} of a step")
    assert in_a_step < MOST_OF_STEP * STEP_S
    assert monitor.cost.of_time(PERIOD_S) > 0.0
    assert monitor.cost.worst_s >= best_s
