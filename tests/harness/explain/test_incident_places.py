"""Places that generated logs blame: what counts, and what is proposed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import NoRun
from trainchaos.chaos.events.log import LOG_VERSION, ORCHESTRATOR, EventWriter, Kind
from trainchaos.harness.explain.incident_places import lemons_of, read_places
from trainchaos.recovery.health.taints import TaintList

HOUR_NS = 3600 * 10**9
HOSTS = [f"host-{index}" for index in range(8)]


def job(
    folder: Path,
    failures: Sequence[tuple[int, int, str]],
    *,
    hosts: Sequence[str] = HOSTS,
    launcher: str = "slurm",
) -> Path:
    """The log of a job of two ranks a node for ten hours. ``failures``: node, generation, cause:
    both ranks of the node are blamed.
    """
    clock = itertools.count()
    folder.mkdir()
    writer = EventWriter(folder, ORCHESTRATOR, lambda: next(clock))
    write = writer.write
    write(Kind.ACTOR_STARTED, pid=1, host="head", wall_ns=1)
    facts = {"arm": "job", "cell": "train.py", "repeat": 0, "seed": 1, "ranks": 16, "spares": 0}
    more = {"steps": 9, "global_batch": 16, "strategy": "drop-replica", "log_version": LOG_VERSION}
    order = {"seed": 1, "samples": 16}
    write(Kind.RUN_STARTED, **facts, **more, order=order, launcher=launcher)
    for node, host in enumerate(hosts):
        write(Kind.NODE_JOINED, node=node, host=host, boot="b", address="", devices=[])
    for node, local in itertools.product(range(len(hosts)), range(2)):
        spawned = {"process": f"w{node}.{local}", "pid": 9, "role": "worker", "mode": "warm"}
        write(Kind.PROCESS_SPAWNED, **spawned, node=node, device=f"cuda:{local}@n{node}")
    for number, (node, generation, cause) in enumerate(failures):
        for local in range(2):
            blamed = {"process": f"w{node}.{local}", "rank": node * 2 + local, "detail": ""}
            write(
                Kind.FAILURE_DETECTED,
                generation=generation,
                failure=2 * number + local,
                cause=cause,
                **blamed,
            )
    clock = itertools.count(10 * HOUR_NS)
    write(Kind.RUN_FINISHED, outcome="completed", reason="", committed_step=9)
    writer.close()
    return folder


def test_ranks_that_fail_together_are_one_incident_of_their_node(tmp_path: Path) -> None:
    history = read_places([job(tmp_path / "a", [(2, 1, "exit"), (2, 2, "hang"), (5, 3, "exit")])])
    assert {place: one.incidents for place, one in history.nodes.items() if one.incidents} == {
        "host-2": 2,
        "host-5": 1,
    }
    assert history.devices["host-2/cuda:1"].incidents == 2
    assert history.nodes["host-0"].used_s == pytest.approx(36000.0), "not twice for two ranks"


def test_what_says_nothing_of_the_hardware_does_not_count(tmp_path: Path) -> None:
    causes = [(1, number, cause) for number, cause in enumerate(("notice", "warning", "nonfinite"))]
    assert not any(
        one.incidents for one in read_places([job(tmp_path / "a", causes)]).nodes.values()
    )
    simulated = job(tmp_path / "b", [(1, 1, "exit")], launcher="sim")
    assert read_places([simulated]).arms == 0


def test_nodes_of_one_host_go_by_their_numbers(tmp_path: Path) -> None:
    history = read_places([job(tmp_path / "a", [(1, 1, "exit")], hosts=["one", "one", "two"])])
    assert {place: one.incidents for place, one in history.nodes.items()} == {
        "0": 0,
        "1": 1,
        "two": 0,
    }


def test_the_same_run_counts_once(tmp_path: Path) -> None:
    log = job(tmp_path / "a", [(2, 1, "exit")])
    (tmp_path / "link").symlink_to(log)
    history = read_places([log, log, tmp_path / "link"])
    assert history.arms == 1 and history.nodes["host-2"].used_s == pytest.approx(36000.0)


def test_a_lemon_is_proposed_and_added_with_its_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = [
        str(job(tmp_path / f"job-{n}", [(3, g, "exit") for g in range(1, 4)] + [(n, 9, "hang")]))
        for n in range(4)
    ]
    (found,) = lemons_of(read_places([Path(each) for each in logs]), false_alarm=0.01)[-1:]
    assert invoke(["taint", "list", "--history", *logs]) == 0
    said = capsys.readouterr().out
    assert "4 arms" in said and "host-3" in said and "host-1" not in said
    taints = tmp_path / "taints.yaml"
    options = ["--taints", str(taints), "--expires", "7d"]
    assert invoke(["taint", "add", "--from-history", *logs, *options]) == 0
    added = TaintList(taints).read()
    assert {each.place.partition("/")[0] for each in added} == {"host-3"}
    assert all(each.by == "history" and each.expiry is not None for each in added)
    evidence = added[-1].evidence
    assert isinstance(evidence, dict)
    assert evidence["incidents"] == found.incidents and evidence["tail"] < evidence["limit"]
    capsys.readouterr()
    assert invoke(["taint", "list", "--history", *logs, "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["lemons"]
    assert [row["place"] for row in rows] == [each.place for each in added]


def test_incidents_that_are_spread_evenly_propose_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = str(job(tmp_path / "a", [(n % 8, 1 + n, "exit") for n in range(40)]))
    taints = tmp_path / "taints.yaml"
    assert invoke(["taint", "add", "--from-history", log, "--taints", str(taints)]) == 0
    assert "nothing is tainted" in capsys.readouterr().out
    assert not taints.exists()


def test_what_is_no_run_and_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NoRun):
        read_places([tmp_path])
    for words in (
        ["list", "--history"],
        ["list", str(tmp_path)],
        ["list", "--history", str(tmp_path)],
        ["add", "--from-history", str(tmp_path), "--reason", "x"],
        ["add", "a", "b", "--reason", "x"],
        ["add", "a"],
    ):
        assert invoke(["taint", *words]) == 2, words
    assert capsys.readouterr().err
