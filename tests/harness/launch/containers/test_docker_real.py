"""Nodes as containers of a real engine: they begin, dial in, are lost, begin anew, and leave
nothing.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.clusters.docker_engine import engine, image_of, labelled, private_engine, python
from tests.support.running import until
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.fault.base import Need
from trainchaos.harness.host import processes
from trainchaos.harness.host.container_engine import connect, engine_url
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.containers.image import interpreter_places, software
from trainchaos.harness.launch.containers.platform import DockerPlatform
from trainchaos.harness.launch.containers.settings import Settings
from trainchaos.harness.launch.nodes.platform import PlatformNeeds
from trainchaos.harness.run import heal
from trainchaos.harness.undo.containers import RemoveContainers
from trainchaos.harness.undo.ledger import Ledger, read_open
from trainchaos.harness.undo.records import MARKER

__all__ = ["engine"]
pytestmark = [pytest.mark.real, pytest.mark.docker]

LIMIT_S = 120.0
ROOT = Path(__file__).resolve().parents[4]
DIAL = """
import socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=120)
link.sendall(sys.argv[3].encode())
link.settimeout(600)
link.recv(1)
"""
HARNESS = """
import sys, time
from pathlib import Path
from trainchaos.harness.run import heal
from trainchaos.harness.host import processes
from trainchaos.harness.host.container_engine import connect
from trainchaos.harness.launch.containers.platform import DockerPlatform
from trainchaos.harness.launch.containers.settings import Settings
from trainchaos.harness.launch.nodes.platform import PlatformNeeds
from trainchaos.harness.host.rundir import RunDirectory
run = RunDirectory(Path(sys.argv[1]))
with heal.guarded(run) as ledger:
    platform = DockerPlatform(
        PlatformNeeds(run=run, cells=[], nodes=2, needs=frozenset(), will=ledger.will), Settings()
    )
    for node in range(2):
        platform.start(node, [sys.executable, "-c", "import time; time.sleep(600)"], {})
    print("up", flush=True)
    time.sleep(600)
"""


OTHER_USER = """
import os, sys
from pathlib import Path
from trainchaos.chaos.fault.base import Need
from trainchaos.harness.run import heal
from trainchaos.harness.launch.containers.inside import ByEngine
from trainchaos.harness.launch.containers.platform import DockerPlatform
from trainchaos.harness.launch.containers.settings import Settings
from trainchaos.harness.launch.nodes.platform import PlatformNeeds
from trainchaos.harness.host.rundir import RunDirectory
assert os.geteuid() != 0
run = RunDirectory(Path(sys.argv[1], "run"))
run.root.mkdir()
with heal.guarded(run) as ledger:
    platform = DockerPlatform(
        PlatformNeeds(run=run, cells=[], nodes=1, needs=frozenset({Need.LINKS}), will=ledger.will),
        Settings(),
    )
    platform.start(0, [sys.executable, "-c", "import time; time.sleep(600)"], {})
    inside = ByEngine(platform.container(0), sys.executable)
    inside.run(["nft", "-f", "-"], "table inet trial {}")
    print(inside.run(["nft", "list", "tables"]))
    assert platform.close() == []
"""


class Nodes:
    """A platform, and where its nodes dial to."""

    def __init__(
        self, root: Path, count: int = 2, needs: frozenset[Need] = frozenset(), **settings: Any
    ) -> None:
        root.mkdir(parents=True, exist_ok=True)
        run, self.marker = RunDirectory(root), f"{root.name}-{secrets.token_hex(8)}"
        wanted = PlatformNeeds(
            run=run, cells=[], nodes=count, needs=needs, will=Ledger(run.ledger).will
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(MARKER, self.marker)
            self.platform = DockerPlatform(wanted, Settings(**settings))
        self.door = socket.create_server((self.platform.host, 0))
        self.door.settimeout(LIMIT_S)
        self.links: list[socket.socket] = []

    def start(self, node: int) -> str:
        """Start one, and wait until it dials: from where. It ends when the connection does."""
        host, port = self.door.getsockname()
        self.platform.start(node, python(DIAL, host, port, node), {"SAID": "here"})
        link, (address, _) = self.door.accept()
        assert link.recv(10) == str(node).encode()
        self.links.append(link)
        return str(address)


@contextmanager
def nodes_of(
    root: Path, count: int = 2, needs: frozenset[Need] = frozenset(), **settings: Any
) -> Iterator[Nodes]:
    """Closed afterwards."""
    made = Nodes(root, count, needs, **settings)
    try:
        yield made
    finally:
        made.door.close()
        left = made.platform.close()
    assert left == []


def test_nodes_dial_in_are_lost_begin_anew_and_leave_nothing(engine: Any, tmp_path: Path) -> None:
    with nodes_of(tmp_path / "run", cpus=1.5, memory_mib=700) as nodes:
        platform = nodes.platform
        calls = {node: nodes.start(node) for node in range(2)}
        assert calls == {n: platform.address(n) for n in range(2)}
        found = platform.container(0).attrs
        assert not found["HostConfig"]["Privileged"] and not found["HostConfig"]["CapAdd"]
        assert (
            found["HostConfig"]["CpuQuota"] == 150_000
            and found["HostConfig"]["Memory"] == 700 << 20
        )
        assert {"SAID=here", f"{MARKER}={nodes.marker}"} <= set(found["Config"]["Env"])
        assert platform.gone(0) is platform.gone(1) is None
        os.kill(platform.init_pid(0), signal.SIGKILL)
        assert until(lambda: platform.gone(0)) and platform.gone(1) is None
        assert platform.init_pid(0) == 0
        assert nodes.start(0) == platform.address(0) and platform.gone(0) is None
        platform.container(1).remove(force=True)  # by somebody else
        assert until(lambda: platform.gone(1)) and nodes.start(1) == platform.address(1)
        assert len(labelled(engine, nodes.marker)) == 3, "two containers and a network"
    assert labelled(engine, nodes.marker) == []
    assert read_open(tmp_path / "run" / "ledger.jsonl") == []


def test_every_address_of_a_run_has_a_name_so_that_nobody_waits_for_a_name_server(
    engine: Any, tmp_path: Path
) -> None:
    with nodes_of(tmp_path / "run") as nodes:
        nodes.start(0)
        addresses = [nodes.platform.host, *(nodes.platform.address(node) for node in range(2))]
        mapped = [f"::ffff:{address}" for address in addresses]
        ask = (
            "import socket, sys; print(*(socket.getnameinfo((each, 1), 0)[0] for each in"
            " sys.argv[1:]))"
        )
        said = (
            nodes.platform.container(0)
            .exec_run([sys.executable, "-c", ask, *addresses, *mapped])
            .output
        )
        names = ["harness", "n0", "n1"]
        assert said.decode().split() == [*names, *(f"{name}-mapped" for name in names)]


def test_two_runs_at_once_do_not_meet(engine: Any, tmp_path: Path) -> None:
    with ExitStack() as stack:
        runs = [
            stack.enter_context(nodes_of(tmp_path / place / "same-name")) for place in ("a", "b")
        ]
        for run in runs:
            run.start(0)
        assert len({run.platform.network.subnet for run in runs}) == 2
        assert runs[0].platform.close() == []
        assert labelled(engine, runs[0].marker) == []
        assert runs[1].platform.gone(0) is None, "ending one run touches no other"


def test_an_agent_that_cannot_start_says_why(engine: Any, tmp_path: Path) -> None:
    with nodes_of(tmp_path / "run") as nodes:
        nodes.platform.start(
            1, python("print('before'); raise SystemExit('no token, no work')"), {}
        )
        why = until(lambda: nodes.platform.gone(1))
    assert "exit code 1" in why and "no token, no work" in why
    assert "no token" in (tmp_path / "run" / "nodes" / "n1.1.log").read_text()


def test_a_mount_made_later_is_seen_by_nodes(engine: Any, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    with nodes_of(tmp_path / "run", needs=frozenset({Need.MOUNT})) as nodes:
        nodes.start(0)
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "chaos-test", place], timeout=120, check=True
        )
        try:
            said = (
                nodes.platform.container(0).exec_run(["df", "--output=source", str(place)]).output
            )
        finally:
            subprocess.run(["umount", place], timeout=120, check=True)
    assert b"chaos-test" in said
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()


def test_somebody_elses_container_of_that_name_is_left_alone(engine: Any, tmp_path: Path) -> None:
    with nodes_of(tmp_path / "run") as nodes:
        other = engine.containers.create(
            nodes.platform.container_image,
            entrypoint=["/usr/bin/true"],
            name=f"{nodes.platform.name}-n0",
        )
        try:
            with pytest.raises(
                InfrastructureError, match=r"start node 0 as .* already in use"
            ) as found:
                nodes.start(0)
            nodes.platform.close()
            other.reload()
        finally:
            other.remove(force=True)
    assert "it is not of this run and is left alone" in found.value.hint


@pytest.mark.parametrize(
    ("says", "complaint"),
    [
        (None, "run python3 of the image .* not found"),
        (
            {"trainchaos": "0.1.0", "torch": "2.9.1"},
            r"has torch 2\.9\.1, and this harness runs with",
        ),
        ({"trainchaos": ""}, "has no trainchaos"),
        ("Segmentation fault", "python3 of the image .* does not work: Segmentation fault"),
    ],
    ids=["no Python", "another torch", "without this package", "broken"],
)
def test_an_image_that_cannot_be_used(
    engine: Any, tmp_path: Path, says: Any, complaint: str
) -> None:
    text = says if isinstance(says, str) else json.dumps(says)
    program = {} if says is None else {"usr/bin/python3": f"#!/bin/sh\necho '{text}'\n".encode()}
    name = image_of(engine, secrets.token_hex(4), program)
    try:
        with pytest.raises(InfrastructureError, match=complaint) as found:
            Nodes(tmp_path / "run", image=name)
    finally:
        engine.images.remove(name, force=True)
    assert found.value.hint
    assert read_open(tmp_path / "run" / "ledger.jsonl") == []


def test_an_image_of_the_user_with_its_own_python(engine: Any, tmp_path: Path) -> None:
    name = image_of(engine, secrets.token_hex(4), {})
    mounts = [
        place
        for place in software(interpreter_places())
        if place not in ("/bin", "/lib", "/lib64", "/sbin")
    ]
    try:
        with nodes_of(tmp_path / "run", image=name, python=sys.executable, mounts=mounts) as nodes:
            assert nodes.start(0) == nodes.platform.address(0)
    finally:
        engine.images.remove(name, force=True)


def test_an_image_that_is_not_there(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match="not on this machine") as found:
        Nodes(tmp_path / "run", image="no-such/image:1")
    assert "docker pull no-such/image:1" in found.value.hint


def test_gpus_without_the_toolkit_are_an_error_that_says_so(engine: Any, tmp_path: Path) -> None:
    if "nvidia" in str(engine.info()["Runtimes"]):
        pytest.skip("this engine can pass GPUs")
    with nodes_of(tmp_path / "run", gpus="all") as nodes:
        with pytest.raises(InfrastructureError, match="device driver") as found:
            nodes.start(0)
        assert "NVIDIA container toolkit" in found.value.hint
        assert labelled(engine, nodes.marker) == [nodes.platform.network.name], (
            "what did not start is gone"
        )
    assert labelled(engine, nodes.marker) == []


def test_a_killed_harness_leaves_nothing_that_heal_does_not_remove(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "runs" / "lost" / "2026-01-01T00-00-00-1")
    run.root.mkdir(parents=True)
    harness = subprocess.Popen([sys.executable, "-c", HARNESS, run.root], stdout=subprocess.PIPE)
    try:
        assert harness.stdout is not None and harness.stdout.readline() == b"up\n"
    finally:
        harness.kill()
        harness.wait(timeout=LIMIT_S)
    (record,) = [
        entry.undo for entry in read_open(run.ledger) if isinstance(entry.undo, RemoveContainers)
    ]
    assert not record.idle() and len(record.living()) == 2
    assert invoke(["ps", "--runs", str(tmp_path / "runs")]) == 0
    assert "n1 (running)" in capsys.readouterr().out
    (healed,) = heal.heal_all(tmp_path / "runs")
    assert healed.state == "healed", healed.lines
    assert record.idle() and labelled(engine, record.run) == []
    assert heal.heal_all(tmp_path / "runs") == []


def test_what_a_run_left_whose_directory_is_gone_is_removed_once_its_harness_is(
    engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "runs" / "lost" / "2026-01-01T00-00-00-2")
    run.root.mkdir(parents=True)
    harness = subprocess.Popen([sys.executable, "-c", HARNESS, run.root], stdout=subprocess.PIPE)
    try:
        assert harness.stdout is not None and harness.stdout.readline() == b"up\n"
        (record,) = [
            entry.undo
            for entry in read_open(run.ledger)
            if isinstance(entry.undo, RemoveContainers)
        ]
        shutil.rmtree(run.root)
        heal.heal_everything(tmp_path / "runs")
        assert len(record.living()) == 2, "its harness lives"
    finally:
        harness.kill()
        harness.wait(timeout=LIMIT_S)
    heal.heal_all(tmp_path / "runs")
    assert len(record.living()) == 2, "before a run only what lies below its directory is healed"
    assert invoke(["heal", "--runs", str(tmp_path / "runs")]) == 0
    assert f"{run.root}: it is over, or its directory is gone" in capsys.readouterr().out
    assert labelled(engine, record.run) == []


def test_a_user_who_is_not_root_may_change_the_network_of_nodes(engine: Any) -> None:
    group = Path(engine_url().removeprefix("unix://")).stat().st_gid
    if os.geteuid() != 0 or not group:
        pytest.skip("needs root, to become a user of the engine's group")
    reading = "+dac_read_search"  # this machine's Python may lie where that user cannot look
    become = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        f"--groups={group}",
        f"--inh-caps={reading}",
        f"--ambient-caps={reading}",
        f"--bounding-set=-all,{reading}",
    ]
    with tempfile.TemporaryDirectory() as place:
        os.chown(place, 65534, 65534)
        ran = subprocess.run(
            [*become, sys.executable, "-B", "-c", OTHER_USER, place],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        left = read_open(Path(place) / "run" / "ledger.jsonl")
    assert ran.returncode == 0, ran.stderr
    assert "table inet trial" in ran.stdout
    assert left == []


@pytest.mark.long
def test_an_engine_that_is_killed_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with private_engine() as own:
        monkeypatch.setenv("DOCKER_HOST", own.url)
        nodes = Nodes(tmp_path / "run")
        nodes.start(0)
        init = nodes.platform.init_pid(0)
        own.kill()
        assert nodes.platform.gone(0) is None, "its containers live on"
        with pytest.raises(InfrastructureError, match="Docker engine"):
            nodes.start(1)
        left = nodes.platform.close()
        assert left and "Docker engine" in left[0]
        own.restart()
        for entry in read_open(tmp_path / "run" / "ledger.jsonl"):
            assert entry.undo is not None and entry.undo.undo().ok
        until(lambda: processes.state(init) == "X")
        client = connect()
        assert labelled(client, nodes.marker) == []
        client.close()
        nodes.door.close()
