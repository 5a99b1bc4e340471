"""What is measured: the cases, and how one of them is described to the Locust process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trainchaos.chaos.errors import ScenarioError

CASE_VARIABLE = "TRAINCHAOS_LOAD_CASE"
"""Environment variable with the path of the case that Locust is to play."""

CASES: Mapping[str, str] = {
    "steady": "all agents train, nothing fails",
    "rack": "all agents of one rack are killed at once, with their ranks",
    "tenth": "every tenth agent is killed at once, with its ranks",
    "restart": "the coordinator is killed and started again with --adopt; all agents dial at once",
    "slow": "one agent in twenty answers 2 s late",
    "lying": "strangers with a wrong token, with another's number, with garbage; agents that lie",
    "cuts": "a quarter of the agents is cut off for 2 s, another for 5 s; all heal",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One case at one size. ``name``: of CASES; ``agents`` of ``ranks`` ranks each, spawned at
    ``ramp`` a second; ``rack``: agents in one rack; ``beat_s``: between two heartbeats of an agent;
    ``step_s``: a step of the simulated job; ``steady_s``: measured before the act, and ``hold_s``
    after it; ``limit_s``: for each wait; ``host``, ``port``: of the coordinator; ``token``: the
    file with the token; ``probe``, ``out``: files of the coordinator's probe, and for what the
    Locust process found; ``asks``: descriptor of a pipe on which it asks for a restart of the
    coordinator.
    """

    name: str
    agents: int
    ranks: int
    ramp: float
    rack: int
    beat_s: float
    step_s: float
    steady_s: float
    hold_s: float
    limit_s: float
    host: str
    port: int
    token: str
    probe: str
    out: str
    asks: int

    def write(self, path: Path) -> None:
        """Write it for ``read``."""
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Case:
        """The case of a file. Raises ScenarioError where it is none."""
        try:
            return Case(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ScenarioError(f"{path} is no case of the load test: {error}") from error

    def struck(self) -> frozenset[int]:
        """Nodes that are killed in this case."""
        if self.name == "rack":
            return frozenset(range(self.agents - self.rack, self.agents))
        if self.name == "tenth":
            return frozenset(range(5, self.agents, 10))
        return frozenset()
