"""The container engine's side of the docker launcher, as far as it shows without an engine."""

from __future__ import annotations

import http.server
import ipaddress
import json
import os
import socket
import socketserver
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.support.search.simulate import KILL, cell_of
from trainchaos.chaos.errors import InfrastructureError, ScenarioError
from trainchaos.harness.host.container_engine import connect, lacks_engine
from trainchaos.harness.launch.containers import image, network
from trainchaos.harness.launch.containers.network import (
    ContainerNetwork,
    free_subnets,
    make_network,
    routed,
    translated,
)
from trainchaos.harness.launch.containers.node_container import NodeContainer
from trainchaos.harness.launchers.docker import Docker
from trainchaos.harness.undo.containers import RemoveContainers, RemoveNetworks
from trainchaos.harness.undo.records import AnyUndo

# ---- finding the engine


@contextmanager
def answering(place: Path, answer: bytes) -> Iterator[str]:
    """A server at a socket that gives everybody the same answer; yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with socketserver.UnixStreamServer(str(place), Handler) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        try:
            yield f"unix://{place}"
        finally:
            server.shutdown()


def ok(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + text


def test_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert lacks_engine() == (
        f"no Docker engine runs here ({tmp_path}/none.sock is not there): "
        "install and start one, or name its socket with DOCKER_HOST"
    )


def test_a_socket_that_nobody_listens_at(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
    with pytest.raises(
        InfrastructureError, match=r"no Docker engine answers at .*refused"
    ) as found:
        connect(f"unix://{tmp_path}/s")
    assert "start it" in found.value.hint


def test_no_permission_names_the_group() -> None:
    was = os.geteuid()
    with tempfile.TemporaryDirectory() as above, answering(Path(above, "s"), b""):
        place = Path(above, "s")
        os.chmod(above, 0o755)
        os.chmod(place, 0o600 if was == 0 else 0)
        if was == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(
                InfrastructureError, match="may not use the Docker engine's socket"
            ) as found:
                connect(f"unix://{place}")
        finally:
            os.seteuid(was)
        assert f"ls -l {place}" in found.value.hint


def test_an_engine_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.5:2376")
    with pytest.raises(
        InfrastructureError, match=r"tcp://10\.0\.0\.5:2376 may be on another machine"
    ):
        connect()


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n", ok({})])
def test_something_else_that_listens_there(tmp_path: Path, answer: bytes) -> None:
    with (
        answering(tmp_path / "s", answer) as url,
        pytest.raises(InfrastructureError, match="does not answer as a Docker engine does"),
    ):
        connect(url)


# ---- addresses


def test_a_range_that_is_taken_is_never_offered() -> None:
    all_but_one = [f"172.{second}.0.0/16" for second in range(18, 31)] + [
        "172.31.0.0/17",
        "172.31.128.0/18",
    ]
    offered = free_subnets(all_but_one, seed="a", nodes=4)
    assert offered
    assert all(
        ipaddress.ip_network(o).subnet_of(ipaddress.ip_network("172.31.192.0/18")) for o in offered
    )
    assert free_subnets(["172.16.0.0/12"], seed="a", nodes=4) == []
    assert free_subnets(["172.18.0.9/32"], seed="a", nodes=4)[:1] != ["172.18.0.0/24"]


@pytest.mark.slow
def test_runs_begin_to_look_at_different_places() -> None:
    assert len({free_subnets([], seed=f"run-{number}", nodes=2)[0] for number in range(50)}) > 40


@pytest.mark.parametrize(("nodes", "prefix"), [(1, 24), (253, 24), (254, 23), (1000, 22)])
def test_there_is_room_for_all_nodes(nodes: int, prefix: int) -> None:
    subnet = free_subnets([], seed="x", nodes=nodes)[0]
    net = ipaddress.ip_network(subnet)
    found = ContainerNetwork(name="n", id="i", subnet=subnet, gateway=str(net[1]))
    last = ipaddress.ip_address(found.address(nodes - 1))
    assert net.prefixlen == prefix and last in net and last != net.broadcast_address
    assert found.gateway != found.address(0)


def test_routes_are_read_from_the_kernel() -> None:
    table = (
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        "eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        "docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0\n"
        "br-1\t00E216AC\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    )
    assert routed(table) == ["172.17.0.0/16", "172.22.226.0/24"]


def test_what_a_dead_engine_still_translates_is_taken() -> None:
    rules = (
        "*nat\n:POSTROUTING ACCEPT [0:0]\n-A OUTPUT ! -d 127.0.0.0/8 -j DOCKER\n"
        "-A POSTROUTING -s 172.20.5.0/24 ! -o br-dead -j MASQUERADE\n"
        "-A DOCKER -d 10.9.8.7 -j DNAT --to-destination 172.21.0.2\n"
    )
    assert translated(rules) == ["172.20.5.0/24", "10.9.8.7/32", "172.21.0.2/32"]


class FakeNetworks:
    """An engine that knows networks only; refuses the first few as overlapping."""

    def __init__(self, refused: int = 0, there: str = "10.77.0.0/24") -> None:
        self.networks, self.refused, self.asked = self, refused, list[str]()
        self._there = there

    def list(self) -> list[Any]:
        return [
            SimpleNamespace(attrs={"IPAM": {"Config": config}})
            for config in (None, [{"Subnet": self._there}])
        ]

    def create(self, name: str, *, ipam: Any, **rest: Any) -> Any:
        from docker.errors import APIError

        self.asked.append(ipam["Config"][0]["Subnet"])
        if len(self.asked) <= self.refused:
            raise APIError("409", explanation="Pool overlaps with other one on this address space")
        return SimpleNamespace(id="abc")


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway need not be an address of this machine."""
    monkeypatch.setattr(network, "_refuse_elsewhere", lambda found: None)


def test_a_range_taken_by_another_run_in_between_is_left_to_it(anywhere: None) -> None:
    engine = FakeNetworks(refused=2)
    made = make_network(engine, "n", labels={}, seed="s", nodes=2)
    assert len(set(engine.asked)) == 3 and made.subnet == engine.asked[-1]
    with pytest.raises(InfrastructureError, match="overlaps"):
        make_network(FakeNetworks(refused=99), "n", labels={}, seed="s", nodes=2)


@pytest.mark.parametrize(
    ("subnet", "complaint"),
    [
        ("10.77.0.128/25", "in use on this machine: .* has 10.77.0.0/24"),
        ("10.78.0.0/29", "no room for 6 nodes"),
    ],
)
def test_a_range_of_the_user_that_cannot_be(subnet: str, complaint: str) -> None:
    engine = FakeNetworks()
    with pytest.raises(InfrastructureError, match=complaint):
        make_network(engine, "n", labels={}, seed="s", nodes=6, subnet=subnet)
    assert engine.asked == []


def test_an_engine_whose_networks_are_elsewhere() -> None:
    with pytest.raises(InfrastructureError, match="networks are not on this machine") as found:
        make_network(FakeNetworks(), "n", labels={}, seed="s", nodes=2, subnet="10.201.7.0/24")
    assert "rootless" in found.value.hint


# ---- images


def test_the_image_of_this_machine_is_the_same_each_time_and_almost_empty() -> None:
    first = image.skeleton()
    assert first == image.skeleton() and len(first) < 64_000
    with tarfile.open(fileobj=BytesIO(first)) as tar:
        names = {entry.name: entry for entry in tar}
        assert {"usr", "tmp", "proc", "etc/passwd"} <= set(names)
        assert names["tmp"].mode == 0o1777


def test_software_is_bound_once_and_never_the_whole_machine(tmp_path: Path) -> None:
    for place in ("env/lib", "env/bin", "environment", "code"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "packages.zip").touch()
    wanted = ["env/lib", "env", "environment", "code", "code", "none", "packages.zip"]
    found = image.software(["/", *(str(tmp_path / place) for place in wanted)])
    ours = [Path(place).name for place in found if place.startswith(str(tmp_path))]
    assert ours == ["code", "env", "environment"]
    assert "/" not in found and "/usr" in found


def test_an_environment_behind_a_link_is_bound_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "shared/bin").mkdir(parents=True)
    (tmp_path / "code").mkdir()
    (tmp_path / "code/env").symlink_to(tmp_path / "shared")
    found = image.software([str(tmp_path / "code"), str(tmp_path / "code/env")])
    ours = [place for place in found if place.startswith(str(tmp_path))]
    assert ours == [str(tmp_path / "code"), str(tmp_path / "shared")]


def test_nodes_are_told_where_code_is_that_the_interpreter_does_not_find(tmp_path: Path) -> None:
    ours = str(Path(image.__file__).resolve().parents[3])
    assert image.import_path([]) == [ours]
    found = image.import_path(
        ["", str(tmp_path), sys.prefix, f"{tmp_path}/none", ours, str(tmp_path)]
    )
    assert found == [str(tmp_path), ours]


def test_an_image_with_another_torch_is_refused_and_another_build_is_not() -> None:
    from importlib import metadata

    ours = {name: metadata.version(name) for name in image.SAME}
    public = ours["torch"].partition("+")[0]
    image.refuse_different("i", ours | {"torch": f"{public}+cu130"})
    with pytest.raises(
        InfrastructureError, match=r"the image i has torch 2\.9\.1, and this harness"
    ) as found:
        image.refuse_different("i", ours | {"torch": "2.9.1"})
    assert f"torch=={public}" in found.value.hint
    with pytest.raises(InfrastructureError, match="has no trainchaos"):
        image.refuse_different("i", ours | {"trainchaos": ""})


# ---- undoing


@pytest.mark.parametrize("kind", [RemoveContainers, RemoveNetworks])
def test_without_an_engine_it_is_not_known_what_is_left(kind: Any, tmp_path: Path) -> None:
    record = kind(engine=f"unix://{tmp_path}/none", run="some-run-0123")
    assert TypeAdapter(AnyUndo).validate_json(record.model_dump_json()) == record
    assert not record.idle()
    outcome = record.undo()
    assert (
        not outcome.ok
        and "no Docker engine runs here" in outcome.text
        and "some-run-0123" in outcome.text
    )


# ---- the launcher's parameters


@pytest.mark.parametrize(
    "params",
    [
        {"subnet": "10.0.0.0/30"},
        {"subnet": "10.0.0.7/24"},
        {"subnet": "fd00::/64"},
        {"subnet": "lan"},
        {"gpus": -1},
        {"gpus": "some"},
        {"mounts": ["data"]},
        {"mounts": ["/"]},
        {"cpus": 0},
        {"memory_mib": 64},
        {"python": ""},
    ],
    ids=str,
)
def test_parameters_that_cannot_be(params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Docker(**params)


@pytest.mark.parametrize(
    ("params", "device", "complaint"),
    [
        ({"memory_mib": 700}, "cpu", "a node of 2 ranks needs 900 or more"),
        ({}, "cuda", "see no GPU"),
        ({"mounts": ["/no/such/place"]}, "cpu", "/no/such/place is no directory"),
    ],
)
def test_a_cell_that_cannot_work_is_an_error_before_anything_starts(
    params: dict[str, Any], device: str, complaint: str
) -> None:
    cell = cell_of("hot-spare", [KILL], ranks=4, launcher={"kind": "docker", "nodes": 2})
    workload = cell.scenario.workload.model_copy(update={"device": device})
    cell = cell.model_copy(
        update={"scenario": cell.scenario.model_copy(update={"workload": workload})}
    )
    with pytest.raises(ScenarioError, match=complaint):
        Docker(**params).check(cell)
    Docker(gpus="all").check(cell)


def test_more_gpus_than_there_are_is_a_skip_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from trainchaos.harness.launch import devices

    monkeypatch.setattr(devices, "cuda_devices", lambda: ["H100"] * 3)
    cell = cell_of("hot-spare", [KILL], ranks=4, launcher={"kind": "docker", "nodes": 2})
    assert Docker(gpus=2).missing(cell) == "2 nodes with 2 GPUs each need 4, this machine has 3"


# ---- the end of a node


class LateContainer:
    """A container that has ended, of which its engine hears only at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def reload(self) -> None:
        self.looks += 1

    @property
    def status(self) -> str:
        return "exited" if self.looks >= 3 else "running"

    @property
    def attrs(self) -> dict[str, Any]:
        return {"State": {"ExitCode": 1 if self.looks >= 3 else 0, "OOMKilled": False}}

    def logs(self, tail: int) -> bytes:
        return b"before\nno token, no work\n"


def test_what_a_node_said_last_is_told_once_the_engine_knows_that_it_has_ended() -> None:
    found = NodeContainer(container=LateContainer(), pid=0, pidfd=-1, at_s=0.0, life=1)
    assert found.last_words() == "exit code 1, it said: before / no token, no work"
