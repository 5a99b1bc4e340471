"""The manifest for Kubernetes: valid by the published schemas, and its commands run, here as
processes of one machine. No cluster takes part.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from ruamel.yaml import YAML

from trainchaos.chaos.cli import invoke
from trainchaos.harness.launch.kubernetes import name_of

VERSIONS = ("1.28.0", "1.31.0", kubernetes_validate.latest_version())
LIMIT_S = 180.0
BASE = """\
version: 1
name: base
launcher: {kind: local, nodes: 2}
workload: {kind: mlp, ranks: 2, steps: 40, global_batch: 8, checkpoint: {every: 10}}
recovery: hot-spare
invariants: {leave_out: [liveness]}  # steps of a millisecond are too short to tell
faults: [{id: kill, kind: process-kill, target: {rank: 1}, at: {step: 22}}]
"""
SCENARIO = """\
extends: ../base.yaml
name: two_pods
description: "text with: a colon, 'quotes' and ünicode"
"""
Document = dict[str, Any]


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    (tmp_path / "base.yaml").write_text(BASE)
    path = tmp_path / "mine" / "pods.yaml"
    path.parent.mkdir()
    path.write_text(SCENARIO)
    return path


def manifest(
    capsys: pytest.CaptureFixture[str], scenario: Path, *words: str
) -> dict[str, Document]:
    """The documents by kind and name."""
    assert invoke(["plan", "--k8s", str(scenario), *words]) == 0
    text = capsys.readouterr().out
    found = list(YAML(typ="safe", pure=True).load_all(text))
    return {f"{one['kind']}/{one['metadata']['name']}": one for one in found}


def container(job: Document) -> Document:
    (one,) = job["spec"]["template"]["spec"]["containers"]
    assert isinstance(one, dict)
    return one


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_is_valid_by_the_published_schema(
    capsys: pytest.CaptureFixture[str], scenario: Path, version: str, device: str
) -> None:
    found = manifest(capsys, scenario, "--set", f"workload.device={device}")
    assert list(found) == [
        "Service/chaos-two-pods",
        "ConfigMap/chaos-two-pods",
        "Job/chaos-two-pods-agents",
        "Job/chaos-two-pods",
    ]
    for document in found.values():
        kubernetes_validate.validate(document, version, strict=True)
    limits = container(found["Job/chaos-two-pods-agents"])["resources"].get("limits")
    assert limits == ({"nvidia.com/gpu": "1"} if device == "cuda" else None)


def test_pods_are_the_scenarios_nodes(capsys: pytest.CaptureFixture[str], scenario: Path) -> None:
    found = manifest(capsys, scenario)
    agents = found["Job/chaos-two-pods-agents"]["spec"]
    assert (agents["completionMode"], agents["completions"], agents["parallelism"]) == (
        "Indexed",
        2,
        2,
    )
    harness = found["Job/chaos-two-pods"]["spec"]["template"]["spec"]
    at = f"--coordinator={harness['hostname']}.{harness['subdomain']}:29431"
    assert at in container(found["Job/chaos-two-pods-agents"])["command"]
    service = found["Service/chaos-two-pods"]
    assert service["metadata"]["name"] == harness["subdomain"]
    pods = found["Job/chaos-two-pods-agents"]["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= pods.items()


def test_a_fault_that_pods_cannot_do_is_refused(
    capsys: pytest.CaptureFixture[str], scenario: Path
) -> None:
    kill = "faults=[{id: kill, kind: node-kill, target: {node: 1}, at: {step: 22}}]"
    assert invoke(["plan", "--k8s", str(scenario), "--set", kill]) == 2
    assert "node-kill" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("launcher={kind: remote, nodes: 2, params: {host: 10.0.0.1}}", "launcher.params.host"),
        ("launcher={kind: remote, nodes: 2, params: {token_file: x}}", "params.token_file"),
    ],
)
def test_what_pods_have_of_their_own_is_not_to_be_given(
    capsys: pytest.CaptureFixture[str], scenario: Path, change: str, said: str
) -> None:
    assert invoke(["plan", "--k8s", str(scenario), "--set", change]) == 2
    assert said in capsys.readouterr().err


def test_a_command_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "version: 1\nname: mine\nworkload: {command: [python, train.py], ranks: 2, steps: 9}\n"
        "faults: [{id: kill, kind: process-kill, target: {rank: 1}, at: {step: 5}}]\n"
    )
    assert invoke(["plan", "--k8s", str(path)]) == 2
    assert "agents cannot run it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("scenario", "name"),
    [("A B_c", "chaos-a-b-c"), ("-", "chaos-run"), ("x" * 90, "chaos-" + "x" * 40)],
)
def test_names_are_those_of_kubernetes(scenario: str, name: str) -> None:
    assert name_of(scenario) == name


def free_port() -> int:
    """A port of the loopback interface that nobody listens at now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def here(words: list[str], places: dict[str, str]) -> list[str]:
    """A command of the manifest as one of this machine."""
    for there, place in places.items():
        words = [word.replace(there, place) for word in words]
    assert words[0] == "chaos"
    return [sys.executable, "-m", "trainchaos", *words[1:]]


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
def test_its_commands_play_the_scenario(
    capsys: pytest.CaptureFixture[str], scenario: Path, processes: ExitStack
) -> None:
    root = scenario.parent.parent
    port = free_port()
    # "launcher.params" can be set only of a scenario that has it
    launcher = f"launcher={{kind: remote, nodes: 2, params: {{port: {port}}}}}"
    found = manifest(capsys, scenario, "--set", launcher)
    mounted = found["ConfigMap/chaos-two-pods"]["data"]
    spec = found["Job/chaos-two-pods"]["spec"]["template"]["spec"]
    (items,) = (one["configMap"]["items"] for one in spec["volumes"] if "configMap" in one)
    for item in items:
        path = root / "mounted" / item["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(mounted[item["key"]])
    token = root / "token"
    token.touch(mode=0o600)
    token.write_text("5a" * 32)
    common = {"/secret/token": str(token), "/runs": str(root / "runs")}
    agents = [
        subprocess.Popen(
            here(
                container(found["Job/chaos-two-pods-agents"])["command"],
                {
                    **common,
                    "chaos-two-pods-harness.chaos-two-pods": "127.0.0.1",
                    "$(NODE)": str(node),
                    "$(ADDRESS)": f"127.0.0.{node + 1}",
                    "/scratch": str(root / f"scratch{node}"),
                },
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for node in range(2)
    ]
    for agent in agents:
        processes.callback(agent.wait, timeout=120)
        processes.callback(agent.kill)
    ran = subprocess.run(
        here(
            container(found["Job/chaos-two-pods"])["command"],
            {**common, "/scenario": str(root / "mounted")},
        ),
        env={**os.environ, "CHAOS_HOST": "127.0.0.1", "CHAOS_TOKEN_FILE": str(token)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for agent in agents:
        assert agent.wait(timeout=60) == 0, "its index of the Job completes"
