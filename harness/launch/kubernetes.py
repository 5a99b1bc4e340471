"""The manifest that runs a scenario on Kubernetes: ``chaos plan --k8s``.

A headless Service, so that pods find each other by name; a ConfigMap with the scenario; an Indexed
Job of agents, one pod for each node, whose index is the node's number; and a Job with the harness.
The run's directory is on a volume that all of them mount. The secret of the agents is made by the
user, and is not in the manifest.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import LiteralScalarString

from trainchaos.chaos import plugins
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.builtin import chain_of
from trainchaos.chaos.planning.planview import RunPlan
from trainchaos.chaos.scenario.model import Scenario
from trainchaos.harness.launch.launcher import Launcher
from trainchaos.harness.launch.requirements import refuse_impossible

KIND = "remote"
RUNS, SCENARIOS, SCRATCH, SECRET = "/runs", "/scenario", "/scratch", "/secret"
GPU = "nvidia.com/gpu"
MOST_BYTES = 900_000  # a ConfigMap holds 1 MiB
GRACE_S = 60
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
Tree = dict[str, Any]


def manifest_of(planned: RunPlan, path: Path, choices: Mapping[str, Any]) -> str:
    """The manifest for a planned run, as YAML. ``choices``: options to pass on to ``chaos run``, by
    name. Raises ScenarioError if a fault needs something that launcher ``remote`` cannot do, or if
    the scenario's file does not fit.
    """
    launcher = plugins.load(plugins.LAUNCHERS, Launcher)[KIND]()
    for each in planned.cells:
        if each.cell.scenario.workload.command is not None:
            raise ScenarioError(
                f"{path}: a command runs on one machine, as it is: agents cannot run it",
                hint="for a script of yours on nodes: workload: {kind: script}",
            )
        spec = each.cell.scenario.launcher.model_copy(update={"kind": KIND})
        scenario = each.cell.scenario.model_copy(update={"launcher": spec})
        refuse_impossible(each.cell.model_copy(update={"scenario": scenario}), launcher)
    largest = max((each.cell.scenario for each in planned.cells), key=lambda s: s.launcher.nodes)
    own = largest.launcher.params if largest.launcher.kind == KIND else {}
    settings = type(launcher)(**own).model_dump()
    if given := [name for name in ("host", "token_file") if settings[name]]:
        raise ScenarioError(
            f"launcher.params.{given[0]}: the pods have an address and a secret of their own",
            hint="leave it out of a scenario for Kubernetes",
        )
    files = {str(place): file.read_text() for place, file in chain_of(path)}
    if sum(map(len, files.values())) > MOST_BYTES:
        raise ScenarioError(f"{path} is too large for a ConfigMap", hint="split it")
    command = ["chaos", "run", f"{SCENARIOS}/{next(iter(files))}", "--runs", RUNS]
    command += _options_again(largest, choices)
    name = name_of(largest.name)
    documents = [
        _service(name, settings["port"]),
        _scenario(name, files),
        _agents(name, largest, settings),
        _harness(name, list(files), command, settings),
    ]
    return _about(name, largest.launcher.nodes, settings["claim"]) + _as_yaml(documents)


def name_of(scenario: str) -> str:
    """A name for objects of Kubernetes (RFC 1123: 63 characters, of which the suffixes and a pod's
    index need some).
    """
    slug = re.sub(r"[^a-z0-9]+", "-", scenario.lower()).strip("-")[:40].strip("-")
    return f"chaos-{slug or 'run'}"


def _about(name: str, nodes: int, claim: str) -> str:
    return f"""\
# {nodes} agents and the harness. They need the claim {claim!r} (ReadWriteMany: all pods share it)
# and a secret:
#   kubectl create secret generic {name} --from-literal=token=$(openssl rand -hex 32)
#   kubectl apply -f THIS_FILE
#   kubectl wait --for=condition=Ready pod --timeout=15m \\
#     -l app.kubernetes.io/instance={name},app.kubernetes.io/component=harness
#   kubectl logs -f job/{name}
#   kubectl delete -f THIS_FILE; kubectl delete secret {name}
# The last lines of that log are the verdict, and report.html is below {RUNS} of the claim. The job
# has failed unless the verdict is PASS.
"""


def _options_again(scenario: Scenario, choices: Mapping[str, Any]) -> list[str]:
    words = [word for value in choices.get("sets", ()) for word in ("--set", value)]
    if scenario.launcher.kind != KIND or choices.get("launcher"):
        words += ["--launcher", KIND]
    for option in ("seed", "repeat"):
        if choices.get(option) is not None:
            words += [f"--{option}", str(choices[option])]
    return [*words, *(word for cell in choices.get("only", ()) for word in ("--cell", cell))]


def _labels(name: str, part: str = "") -> Tree:
    labels = {"app.kubernetes.io/name": "trainchaos", "app.kubernetes.io/instance": name}
    return labels | ({"app.kubernetes.io/component": part} if part else {})


def _service(name: str, port: int) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": _labels(name)},
        "spec": {
            "clusterIP": "None",
            "selector": _labels(name),
            "publishNotReadyAddresses": True,  # agents look for the harness before it listens
            "ports": [{"name": "agents", "port": port}],
        },
    }


def _scenario(name: str, files: Mapping[str, str]) -> Tree:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": _labels(name)},
        "data": {
            f"file-{number}": LiteralScalarString(text)
            for number, text in enumerate(files.values())
        },
    }


def _agents(name: str, scenario: Scenario, settings: Mapping[str, Any]) -> Tree:
    nodes, ranks = scenario.launcher.nodes, scenario.topology.ranks_per_node
    gpus = settings["gpus_per_node"] or (ranks if scenario.workload.device == "cuda" else 0)
    resources: Tree = {"requests": {"cpu": str(settings["cpus_per_node"] or ranks)}}
    if gpus:
        resources["limits"] = {GPU: str(gpus)}
    agent = [
        "chaos",
        "agent",
        f"--coordinator={name}-harness.{name}:{settings['port']}",
        "--node=$(NODE)",
        "--address=$(ADDRESS)",
        f"--token-file={SECRET}/token",
        f"--scratch={SCRATCH}",
    ]
    environment = [
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    pod = _pod(name, "agent", settings["image"], agent, environment, resources)
    pod["spec"] |= {
        # an agent that ends abnormally is a node that was lost: it starts anew and comes back
        "restartPolicy": "OnFailure",
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": _labels(name, "agent")},
            }
        ],
    }
    pod["spec"]["volumes"] += [_shared(settings), *_own_space()]
    pod["spec"]["containers"][0]["volumeMounts"] += [
        {"name": "runs", "mountPath": RUNS},
        {"name": "scratch", "mountPath": SCRATCH},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    return _job(
        f"{name}-agents",
        name,
        {
            "completionMode": "Indexed",
            "completions": nodes,
            "parallelism": nodes,
            "backoffLimit": 100 * nodes,
            "template": pod,
        },
    )


def _harness(
    name: str, files: Sequence[str], command: Sequence[str], settings: Mapping[str, Any]
) -> Tree:
    environment: list[Tree] = [
        {"name": "CHAOS_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "CHAOS_TOKEN_FILE", "value": f"{SECRET}/token"},
    ]
    resources = {"requests": {"cpu": "1"}}
    pod = _pod(name, "harness", settings["image"], command, environment, resources)
    items = [{"key": f"file-{number}", "path": place} for number, place in enumerate(files)]
    pod["spec"] |= {"hostname": f"{name}-harness", "restartPolicy": "Never"}
    pod["spec"]["volumes"] += [
        _shared(settings),
        {"name": "scenario", "configMap": {"name": name, "items": items}},
    ]
    pod["spec"]["containers"][0]["volumeMounts"] += [
        {"name": "runs", "mountPath": RUNS},
        {"name": "scenario", "mountPath": SCENARIOS, "readOnly": True},
    ]
    return _job(name, name, {"backoffLimit": 0, "template": pod})


def _pod(
    name: str,
    part: str,
    image: str,
    command: Sequence[str],
    environment: Sequence[Tree],
    resources: Tree,
) -> Tree:
    return {
        "metadata": {"labels": _labels(name, part)},
        "spec": {
            "subdomain": name,
            "terminationGracePeriodSeconds": GRACE_S,  # SIGTERM is the agent's notice of preemption
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": part,
                    "image": image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": list(command),
                    "env": list(environment),
                    "resources": resources,
                    "volumeMounts": [{"name": "secret", "mountPath": SECRET, "readOnly": True}],
                }
            ],
            # others must not read it: chaos agent refuses it otherwise
            "volumes": [{"name": "secret", "secret": {"secretName": name, "defaultMode": 0o400}}],
        },
    }


def _job(name: str, instance: str, spec: Tree) -> Tree:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": _labels(instance)},
        "spec": spec,
    }


def _shared(settings: Mapping[str, Any]) -> Tree:
    return {"name": "runs", "persistentVolumeClaim": {"claimName": settings["claim"]}}


def _own_space() -> list[Tree]:
    return [
        {"name": "scratch", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # a container has 64 MiB by itself
    ]


def _as_yaml(documents: Sequence[Tree]) -> str:
    yaml, stream = YAML(), io.StringIO()
    yaml.width = 1000
    yaml.dump_all(documents, stream)
    return stream.getvalue()
