"""The size of a search's jobs, and their durations: on the simulator, and with real processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trainchaos.harness.fuzz.draw.values import LEAST, MOST


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Scale of the jobs drawn; times in seconds. ``steps``: fewest and most; ``ranks``, ``nodes``:
    options, frequent ones repeated; ``step_s``: about how long a step takes; ``lasts_s``: shortest
    and longest duration, ``hides_s``: of what only hides signs of life, which ends as soon as it is
    noticed; ``evaluates_s``: longest evaluation; ``still_s``: time without a step
    after which a job is given up; ``most``, ``least``: limits of parameters, by the ends of their
    names.
    """

    steps: tuple[int, int]
    ranks: tuple[int, ...]
    nodes: tuple[int, ...]
    step_s: float
    lasts_s: tuple[float, float]
    hides_s: tuple[float, float]
    evaluates_s: float
    still_s: int
    most: Mapping[str, float]
    least: Mapping[str, float]


SIMULATED = Scale(
    steps=(36, 72),
    ranks=(2, 2, 3, 3, 4, 4, 4, 5, 6, 8),
    nodes=(1, 1, 2, 3, 4),
    step_s=0.035,
    lasts_s=(0.4, 0.7),
    hides_s=(2.0, 4.0),
    evaluates_s=5.0,
    still_s=300,
    most=MOST,
    least=LEAST,
)
"""Simulated time costs nothing. ``still_s`` exceeds every wait of ours, including the two minutes
for a process to start.
"""

MOST_FOR_REAL = MappingProxyType(
    {"mbit_per_s": 20.0, "_s": 2.0, "_ms": 100.0, "_mib": 64.0, "spares": 2.0, "cores": 2.0}
)
LEAST_FOR_REAL = MappingProxyType({"mbit_per_s": 1.0, "cores": 0.2})
NODES_EACH_ALONE = (1, 2, 2)
"""Numbers of nodes where each node is a process that imports torch."""


def for_real(cores: int, *, agents: bool) -> Scale:
    """Scale of jobs that train on so many cores, within about half a minute per arm: steps take
    milliseconds, recoveries some tenths of a second, and hangs are detected after seconds.
    """
    return Scale(
        steps=(20, 60),
        ranks=tuple(n for n in (2, 2, 3, 3, 4) if n <= max(2, 2 * cores)),
        nodes=NODES_EACH_ALONE if agents else (1, 1, 2, 3),
        step_s=0.02,
        lasts_s=(0.1, 1.0),
        hides_s=(2.0, 4.0),
        evaluates_s=0.5,
        still_s=60,
        most=MOST_FOR_REAL,
        least=LEAST_FOR_REAL,
    )
