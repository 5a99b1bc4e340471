"""The configuration that a rank process of an arm starts with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from trainchaos.chaos.scenario.workload import EvaluateSpec
from trainchaos.harness.launch.links.route import Address
from trainchaos.recovery.process.entry import Birth


class RankConfig(Birth):
    """The configuration that a rank process starts with. ``job``: a JobConfig; ``link_proxy``:
    address of the link proxy, if connections to peers go through one; ``group``: name of the arm's
    control groups, if its faults need some; ``faults``: kinds that may act in this arm;
    ``pipeline``: its schedule and the parts of a rank's samples in it.
    """

    role: Literal["worker", "spare"]
    workload: str
    workload_params: dict[str, Any]
    data: Path
    device: str
    threads: int
    evaluate: EvaluateSpec | None = None
    job: dict[str, Any]
    link_proxy: Address | None = None
    group: str | None = None
    faults: tuple[str, ...] = ()
    pipeline: tuple[Literal["1f1b", "gpipe"], int] | None = None
