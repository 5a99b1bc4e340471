"""Time-outs of a built-in workload's supervisor, as the scenario sets them."""

from __future__ import annotations

from trainchaos.chaos.scenario.model import Scenario
from trainchaos.recovery.supervise.supervision import Timing, check_limits


def timing_of(scenario: Scenario) -> Timing:
    """The default limits, overridden by those of the scenario."""
    said = scenario.timeouts
    return Timing().with_limits(hang_s=said.hang, park_s=said.park, join_s=said.join)


def refuse_clashing(scenario: Scenario) -> None:
    """Raise ScenarioError when limits are in the wrong order."""
    check_limits(timing_of(scenario))
