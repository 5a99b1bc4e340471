"""The manifest that runs a scenario on Kubernetes: ``chaos plan --k8s``.

A headless Service, so that pods find each other by name; a ConfigMap with the scenario; an Indexed
Job of agents, one pod for each node, whose index is the node's number; and a Job with the harness.
The run's directory is on a volume that all of them mount. The secret of the agents is made by the
user, and is not in the manifest. Its text is ``kubernetes.yaml.j2``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.builtin import chain_of
from trainchaos.chaos.planning.planview import RunPlan
from trainchaos.harness.launch.submitted import filled, largest_under, options_again

KIND = "remote"
MOST_BYTES = 900_000  # a ConfigMap holds 1 MiB


def manifest_of(planned: RunPlan, path: Path, choices: Mapping[str, Any]) -> str:
    """The manifest for a planned run, as YAML. ``choices``: options to pass on to ``chaos run``, by
    name. Raises ScenarioError if a fault needs something that launcher ``remote`` cannot do, or if
    the scenario's file does not fit.
    """
    for each in planned.cells:
        if each.cell.scenario.workload.command is not None:
            raise ScenarioError(
                f"{path}: a command runs on one machine, as it is: agents cannot run it",
                hint="for a script of yours on nodes: workload: {kind: script}",
            )
    largest, launcher = largest_under(planned, KIND)
    settings = launcher.model_dump()
    if given := [name for name in ("host", "token_file") if settings[name]]:
        raise ScenarioError(
            f"launcher.params.{given[0]}: the pods have an address and a secret of their own",
            hint="leave it out of a scenario for Kubernetes",
        )
    files = {str(place): file.read_text() for place, file in chain_of(path)}
    if sum(map(len, files.values())) > MOST_BYTES:
        raise ScenarioError(f"{path} is too large for a ConfigMap", hint="split it")
    ranks = largest.topology.ranks_per_node
    on_gpus = largest.workload.device == "cuda"
    return filled(
        Path(__file__).with_name("kubernetes.yaml.j2"),
        name=name_of(largest.name),
        nodes=largest.launcher.nodes,
        cpus=settings["cpus_per_node"] or ranks,
        gpus=settings["gpus_per_node"] or (ranks if on_gpus else 0),
        settings=settings,
        files=files,
        command=[
            *("chaos", "run", f"/scenario/{next(iter(files))}", "--runs", "/runs"),
            *options_again(largest, KIND, choices),
        ],
    )


def name_of(scenario: str) -> str:
    """A name for objects of Kubernetes (RFC 1123: 63 characters, of which the suffixes and a pod's
    index need some).
    """
    slug = re.sub(r"[^a-z0-9]+", "-", scenario.lower()).strip("-")[:40].strip("-")
    return f"chaos-{slug or 'run'}"
