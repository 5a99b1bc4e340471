"""The monitor: period, sources that fail, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.costs import calls
from trainchaos.recovery.health.monitor import Monitor
from trainchaos.recovery.health.readings.reading import Problem, Reading
from trainchaos.recovery.health.readings.reports import ReportFile
from trainchaos.recovery.health.sources.host import HostSource
from trainchaos.recovery.health.sources.job import JobSource
from trainchaos.recovery.health.sources.reported import ReportedSource

STEP_S = 0.04
MOST_CALLS = 10_000  # of Python and C, for 200 steps of ranks: 4,500 today


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


def test_a_source_that_raises_does_not_stop_the_others() -> None:
    job = JobSource()
    monitor = Monitor(sources=[Broken(), job], period_s=1.0)
    for now_s in (0.0, 1.0, 2.0):
        job.feed(0, "loss", 1.0, "1", now_s)
        assert len(monitor.poll(now_s)) == 1
    (problem,) = monitor.problems()
    assert (problem.metric, problem.why) == ("broken", "RuntimeError: it broke")
    assert monitor.problems() == []


@pytest.mark.parametrize("period_s", [0.0, -1.0, math.nan])
def test_nonsense_is_refused(period_s: float) -> None:
    with pytest.raises(ValueError, match="a period"):
        Monitor(sources=[], period_s=period_s)


def test_reading_host_job_and_reports_is_few_calls(tmp_path: Path) -> None:
    """Of a second of steps of 40 ms, with what 8 ranks say in it. What they take is measured by
    ``benchmarks.calls``.
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
    for second in range(5):
        for number in range(25):
            for rank in range(8):
                at_s = second + number * STEP_S
                job.committed({**step, "rank": rank}, 25 * second + number, at_s)
        assert calls(lambda at_s=float(second): monitor.poll(at_s)) < MOST_CALLS  # type: ignore[misc]
    assert monitor.cost.worst_s >= monitor.cost.total_s / monitor.cost.reads
