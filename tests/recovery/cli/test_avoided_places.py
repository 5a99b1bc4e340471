"""``recovery.run`` and tainted places: what is left, and jobs that have too few of it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.clusters.cluster import Cluster
from tests.support.running import EPOCHS, RECOVERABLE, ROOT, kill
from trainchaos.chaos.events.log import ORCHESTRATOR, Kind
from trainchaos.recovery.cli.avoided_places import AvoidedPlaces
from trainchaos.recovery.health.taints import Taint, TaintList, TooFewPlaces, made, of_place

NOW = datetime.now(UTC)
HERE = socket.gethostname()
GPUS = tuple(f"cuda:{index}" for index in range(4))


def taint(place: str) -> Taint:
    return made({**of_place(place), "reason": "XID 79", "since": NOW, "by": "alarm"})


@pytest.fixture
def listed(tmp_path: Path) -> Callable[..., Path]:
    """A list of taints with these places."""

    def add(*places: str) -> Path:
        path = tmp_path / "taints.yaml"
        for place in places:
            TaintList(path).add(taint(place), NOW)
        return path

    return add


def test_devices_of_this_machine_that_are_left() -> None:
    avoided = AvoidedPlaces([taint(f"{HERE}/cuda:1"), taint("elsewhere")])
    assert avoided.left_here(GPUS, 3) == ("cuda:0", "cuda:2", "cuda:3")
    said = avoided.as_event()
    assert [each["place"] for each in said["taints"]] == [f"{HERE}/cuda:1"]
    assert (said["nodes"], said["devices"]) == ([], ["cuda:1"])
    assert avoided.left_here(GPUS, 8) == ("cuda:0", "cuda:2", "cuda:3"), "shared in any case"
    with pytest.raises(TooFewPlaces, match="4 processes are to start, and 3 of 4 places"):
        avoided.left_here(GPUS, 4)
    untouched = AvoidedPlaces([taint("elsewhere/cuda:1")])
    assert untouched.left_here(GPUS, 4) == GPUS and untouched.as_event() == {}


def test_nothing_is_left_of_a_machine_that_is_tainted() -> None:
    with pytest.raises(TooFewPlaces) as caught:
        AvoidedPlaces([taint(HERE)]).left_here(("cpu",), 2)
    assert f"0 of 1 places are not tainted: {HERE} (XID 79)" in str(caught.value)
    assert "chaos taint clear" in str(caught.value) and caught.value.exit_code == 7


def test_spots_on_nodes_that_are_left() -> None:
    avoided = AvoidedPlaces([taint("a"), taint("b/cuda:1")])
    avoided.hosts_are({0: "a.example.com", 1: "b"})
    spots = [(0, "cuda:0"), (0, "cuda:1"), (1, "cuda:0"), (1, "cuda:1")]
    assert avoided.left(spots) == [spots[2]]
    assert avoided.left(spots[:2]) == spots[:2], "there is no other"
    avoided.refuse_shortage(spots, 1)
    said = avoided.as_event()
    assert (said["nodes"], said["devices"]) == ([0], ["cuda:1@n1"])
    with pytest.raises(TooFewPlaces, match="2 processes are to start, and 1 of 4 places"):
        avoided.refuse_shortage(spots, 2)


def supervised(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A ``recovery.run`` that does not begin."""
    return subprocess.run(
        [sys.executable, "-m", "trainchaos.recovery.run", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )


@pytest.mark.slow
def test_a_job_of_this_machine_says_so_before_it_starts(
    tmp_path: Path, listed: Callable[..., Path]
) -> None:
    done = supervised(tmp_path, "--taints", listed(HERE), "--device", "cpu", RECOVERABLE, EPOCHS)
    assert done.returncode == 7 and "0 of 1 places are not tainted" in done.stderr


@pytest.mark.long
def test_a_list_that_is_none_starts_no_job(tmp_path: Path) -> None:
    (tmp_path / "taints.yaml").write_text("version: 1\ntaints: [3]\n")
    done = supervised(tmp_path, "--taints", tmp_path / "taints.yaml", RECOVERABLE, EPOCHS)
    assert done.returncode == 2 and "taints.yaml:2: taint 1: Input should be" in done.stderr
    done = supervised(tmp_path, "--taints", "typo", RECOVERABLE, EPOCHS)
    assert done.returncode == 2 and "typo: no such list" in done.stderr


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made_here = Cluster(tmp_path)
    yield made_here
    made_here.close()


@pytest.mark.real
@pytest.mark.long
def test_ranks_spares_and_replacements_start_on_other_nodes(
    cluster: Cluster, listed: Callable[..., Path]
) -> None:
    cluster.agents.append(cluster._agent(2))
    job = cluster.run(
        "--taints",
        listed("0"),
        "--nodes",
        "3",
        "--ranks",
        "3",
        "--spares",
        "1",
        RECOVERABLE,
        EPOCHS,
    )
    job.wait_for(lambda: job.trained(30))
    kill(job.pid_of("w1"))
    assert job.end() == 0, job.said
    assert "tainted, and not used while there are others: 0 (XID 79)" in job.said
    nodes = [event.data["node"] for event in job.of(ORCHESTRATOR, Kind.PROCESS_SPAWNED)]
    assert len(nodes) == 5 and set(nodes) == {1, 2}
    (said,) = job.of(ORCHESTRATOR, Kind.TAINTS_HONOURED)
    assert said.data["nodes"] == [0] and said.data["taints"][0]["place"] == "0"


@pytest.mark.long
@pytest.mark.real
def test_too_few_nodes_are_said_once_their_agents_are_there(
    cluster: Cluster, listed: Callable[..., Path]
) -> None:
    job = cluster.run("--taints", listed("1"), "--ranks", "4", RECOVERABLE, EPOCHS)
    assert job.end() == 7, job.said
    assert "5 processes are to start, and 3 of 6 places are not tainted: 1 (XID 79)" in job.said
    assert not job.of(ORCHESTRATOR, Kind.PROCESS_SPAWNED)


def test_without_taints_no_job_is_refused() -> None:
    """Whatever else is lacking is said by whoever knows why."""
    for avoided in (AvoidedPlaces([]), AvoidedPlaces([taint("elsewhere")])):
        avoided.refuse_shortage([], 4)  # raises nothing
        assert avoided.as_event() == {}
