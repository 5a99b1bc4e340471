"""The batch script that requests a scenario's nodes from Slurm and runs it there. Its text is
``script.sh.j2``.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.planning.planview import RunPlan
from trainchaos.harness.host.slurm_commands import Commands, installed
from trainchaos.harness.launch.slurm.allocation import AllocationOptions
from trainchaos.harness.launch.submitted import filled, largest_under, options_again
from trainchaos.recovery.health.taints import Taint, same_host, taints_now

SLACK = 3.0
"""Factor of the time limit over the estimate, which is accurate to a factor of two."""
LEAST_S = 600.0
DAY_S, HOUR_S, MINUTE_S = 86400, 3600, 60


def script_of(planned: RunPlan, path: Path, choices: Mapping[str, Any]) -> str:
    """The script for a planned run. ``choices``: options to pass on to ``chaos run``, by name.

    Raises ScenarioError if a fault needs something that a Slurm job cannot do.
    """
    largest, asked = largest_under(planned, "slurm")
    assert isinstance(asked, AllocationOptions)
    taints, nodes = taints_now(), largest.launcher.nodes
    own = [option.partition("=")[2] for option in asked.extra if option.startswith("--exclude=")]
    file = choices.get("taints")
    avoiding = () if file is None else ("--taints", str(file.absolute()))
    again = ["run", str(path), *options_again(largest, "slurm", choices), *avoiding]
    return filled(
        Path(__file__).with_name("script.sh.j2"),
        name=largest.name,
        asked=asked,
        nodes=nodes,
        spare=sum(not largest.topology.ranks_on(node) for node in range(nodes)),
        cpus=asked.cpus_per_node or largest.topology.ranks_per_node,
        limit=_limit(planned.estimate_s),
        exclude=[*(excluded(taints, _known_hosts()) if taints else ()), *own],
        directory=shlex.quote(str(Path.cwd())),
        command=shlex.join([sys.executable, "-m", "trainchaos", *again]),
    )


def excluded(taints: Sequence[Taint], known: Sequence[str] | None) -> tuple[str, ...]:
    """The hosts that a job must not get: those of tainted nodes. A tainted device excludes no
    node: ranks avoid it there. ``known``: Slurm's names of its nodes, since sbatch refuses a name
    that is not among them; None: they cannot be asked for, and numbers alone, which name emulated
    nodes, are left out.
    """
    nodes = [taint.node for taint in taints if taint.node is not None]
    if known is None:
        return tuple(dict.fromkeys(node for node in nodes if not node.isdecimal()))
    return tuple(host for host in known if any(same_host(host, node) for node in nodes))


def _known_hosts() -> tuple[str, ...] | None:
    if not installed():
        return None
    try:
        return Commands().known()
    except InfrastructureError:
        return None


def _limit(estimate_s: float) -> str:
    """Slurm's days-hours:minutes:seconds, in whole minutes."""
    minutes = math.ceil(max(LEAST_S, estimate_s * SLACK) / MINUTE_S)
    days, rest = divmod(minutes * MINUTE_S, DAY_S)
    hours, rest = divmod(rest, HOUR_S)
    return f"{days}-{hours:02}:{rest // MINUTE_S:02}:00"
