"""The batch script that requests a scenario's nodes from Slurm and runs it there."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.planning.planview import RunPlan
from trainchaos.chaos.scenario.model import Scenario
from trainchaos.harness.host.slurm_commands import Commands, installed
from trainchaos.harness.launch.slurm.allocation import AllocationOptions
from trainchaos.harness.launch.submitted import largest_under, options_again
from trainchaos.recovery.health.quarantine import same_host, taints_now
from trainchaos.recovery.health.taint import Taint

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
    taints = taints_now()
    file = choices.get("taints")
    avoiding = () if file is None else ("--taints", str(file.absolute()))
    return batch_script(
        largest,
        asked,
        nodes=largest.launcher.nodes,
        estimate_s=planned.estimate_s,
        directory=Path.cwd(),
        command=["run", str(path), *options_again(largest, "slurm", choices), *avoiding],
        exclude=excluded(taints, _known_hosts()) if taints else (),
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


def batch_script(
    scenario: Scenario,
    asked: AllocationOptions,
    *,
    nodes: int,
    estimate_s: float,
    command: Sequence[str],
    directory: Path,
    exclude: Sequence[str] = (),
) -> str:
    """The script.

    ``nodes``: the maximum over the cells, including spare nodes; ``estimate_s``: expected seconds
    of the whole run; ``command``: what follows ``chaos``; ``directory``: where it runs, on a file
    system that all nodes share; ``exclude``: hosts that the job must not get.
    """
    spare = sum(not scenario.topology.ranks_on(node) for node in range(scenario.launcher.nodes))
    options = [
        *_options(scenario, asked, nodes, estimate_s),
        *_excluding(asked, exclude),
        # last, so that the user's option overrides ours
        *(each for each in asked.extra if not each.startswith("--exclude=")),
    ]
    about = f"{nodes} node{'s' if nodes > 1 else ''}"
    about += f", {spare} of them spare" if spare else ""
    about += f", and {asked.reserve_nodes} in reserve" if asked.reserve_nodes else ""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in options),
        (
            f"# {scenario.name}: {about}. Submit it with sbatch; the directory below has to be on a"
            " shared file system."
        ),
        "set -e",
        f"cd {shlex.quote(str(directory))}",
        *asked.setup,
        (
            "# exec: the signal that Slurm sends before the end then reaches chaos, which heals and"
            " writes its verdict."
        ),
        f"exec {shlex.join([sys.executable, '-m', 'trainchaos', *command])}",
    ]
    return "\n".join(lines) + "\n"


def _options(
    scenario: Scenario, asked: AllocationOptions, nodes: int, estimate_s: float
) -> Iterator[str]:
    cpus = asked.cpus_per_node or scenario.topology.ranks_per_node
    yield f"--job-name=chaos-{scenario.name}"
    yield f"--nodes={nodes + asked.reserve_nodes}"
    yield "--ntasks-per-node=1"
    yield f"--cpus-per-task={cpus}"
    if asked.gpus_per_node:
        yield f"--gpus-per-node={asked.gpus_per_node}"
    yield "--no-kill"  # the loss of a node is under test: the job must continue
    yield f"--signal=B:TERM@{asked.grace_s}"
    yield f"--time={_limit(estimate_s)}"
    yield "--output=%x-%j.out"
    yield "--open-mode=append"  # a requeued job continues the same file
    if asked.partition:
        yield f"--partition={asked.partition}"
    if asked.account:
        yield f"--account={asked.account}"


def _excluding(asked: AllocationOptions, exclude: Sequence[str]) -> Iterator[str]:
    """One option for hosts that are tainted and those that the user excludes: sbatch takes only the
    last of several.
    """
    own = [option.partition("=")[2] for option in asked.extra if option.startswith("--exclude=")]
    if exclude or own:
        yield f"--exclude={','.join([*exclude, *own])}"


def _limit(estimate_s: float) -> str:
    """Slurm's days-hours:minutes:seconds, in whole minutes."""
    minutes = math.ceil(max(LEAST_S, estimate_s * SLACK) / MINUTE_S)
    days, rest = divmod(minutes * MINUTE_S, DAY_S)
    hours, rest = divmod(rest, HOUR_S)
    return f"{days}-{hours:02}:{rest // MINUTE_S:02}:00"
