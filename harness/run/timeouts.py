"""How long the supervisor of a built-in workload waits, by what the scenario says."""

from __future__ import annotations

from chaos.scenario.model import Scenario
from recovery.supervise import limits
from recovery.supervise.supervision import Timing


def timing_of(scenario: Scenario) -> Timing:
    """The usual limits, but for those that the scenario gives."""
    said = scenario.timeouts
    return Timing().with_limits(hang_s=said.hang, park_s=said.park, join_s=said.join)


def refuse_clashing(scenario: Scenario) -> None:
    """Raise ScenarioError for limits in the wrong order."""
    limits.check(timing_of(scenario))
