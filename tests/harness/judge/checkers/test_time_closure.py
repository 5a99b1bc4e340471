"""Times of a command that ends on losses that are no numbers: what its recovery came to is a
judgement, and no time.
"""

from __future__ import annotations

import math

from tests.harness.compare.test_compare_outcome import STEPS, Fleet, control
from tests.support.search.simulate import cell_of
from trainchaos.chaos.events.log import Log
from trainchaos.harness.judge.checkers import CHECKERS, Evidence, check
from trainchaos.harness.judge.results import Finding

KILL = {"id": "hit", "kind": "process-kill", "target": {"rank": 1}, "at": {"step": 30}}


def lost_to_nan() -> Log:
    """A rank is killed and replaced, and the job goes on to its end with losses that are no
    numbers.
    """
    fleet = Fleet()
    fleet.reach(1, 30)
    fleet.killed()
    fleet.found("w0", "w2")
    fleet.reach(31, STEPS, loss=math.nan)
    return fleet.end()


def evidence(log: Log) -> Evidence:
    return Evidence(
        arm="faulted",
        cell=cell_of("hot-spare", [KILL]),
        log=log,
        control=control(),
        controls=(control(),),
        exact={},
    )


def closure(made: Evidence) -> Finding:
    return check(CHECKERS["time-closure"], made)


def test_a_command_that_ends_in_nan_never_recovered_and_its_times_add_up() -> None:
    made = evidence(lost_to_nan())
    (incident,) = made.measures.incidents
    assert (incident.outcome, incident.recovery_time) == ("sdc-escape", math.inf)
    assert incident.phases and math.isfinite(sum(span.seconds for span in incident.phases))
    assert closure(made).verdict == "pass"
