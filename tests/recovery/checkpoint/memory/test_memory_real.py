"""Checkpoints in memory with real processes: they outlive the ranks, and with a copy the node."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness.run.test_real import run
from tests.recovery.test_run import EPOCHS, RECOVERABLE, STEPS, Running, kill, start, unharmed
from trainchaos.chaos.events.log import Event, Kind, read_log
from trainchaos.harness.judge.results import Results
from trainchaos.recovery.checkpoint.memory.header import is_memory
from trainchaos.recovery.checkpoint.memory.keepers import Keepers

__all__ = ["start", "unharmed"]  # fixtures

ONLY_MEMORY = ("--strategy", "checkpoint-restart", "--every", "100000", "--memory-checkpoints")


def sockets() -> dict[str, str]:
    """Keepers' sockets that somebody listens on, those of other runs of this machine too: inode ->
    name.
    """
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return {row[6]: row[7] for row in rows if row[-1].startswith("@trainchaos-")}


def sockets_of(pid: int) -> set[str]:
    """Names of those that a process has open."""
    links = [os.readlink(link.path) for link in os.scandir(f"/proc/{pid}/fd")]
    return {name for inode, name in sockets().items() if f"socket:[{inode}]" in links}


def gone(pid: int) -> bool:
    """Whether nothing of it executes."""
    path = Path(f"/proc/{pid}/stat")
    return not path.exists() or path.read_text().rsplit(")", 1)[1].split()[0] in "ZX"


@pytest.mark.real
@pytest.mark.long
def test_killed_ranks_are_restored_from_memory_and_a_killed_keeper_is_followed(
    start: Callable[..., Running], unharmed: dict[str, object]
) -> None:
    job = start("--ranks", "4", *ONLY_MEMORY, "2", RECOVERABLE, EPOCHS)
    job.wait_for(lambda: job.trained(30))
    names = sockets_of(job.pid_of("k0"))
    assert names
    kill(job.pid_of("k0"))
    job.wait_for(
        lambda: any(e.data["process"] == "k1" for e in job.of("orchestrator", Kind.PROCESS_SPAWNED))
    )
    job.wait_for(lambda: any(e.step and e.step > 40 for e in kept(job)))
    kill(job.pid_of("w2"))
    assert job.end() == 0, job.said
    assert job.digest() == unharmed
    ready = job.of("orchestrator", Kind.GENERATION_READY)[-1]
    assert is_memory(ready.data["checkpoint"]) and ready.data["resume_step"] > 40
    assert "restored from memory-step-" in job.said and f"{STEPS} steps committed" in job.said
    assert not list((job.events.parent / "checkpoints").glob("step-*")), "the disk had nothing"
    spawned = [e.data["pid"] for e in job.of("orchestrator", Kind.PROCESS_SPAWNED)]
    assert all(gone(pid) for pid in spawned)
    assert not names & set(sockets().values())


def kept(job: Running) -> list[Event]:
    """Of rank 0, what it was told is kept in memory."""
    return [e for e in job.of("w0", Kind.CHECKPOINT_COMMITTED) if e.data["place"] == "memory"]


@pytest.mark.real
@pytest.mark.long
def test_memory_that_is_too_small_is_said_and_training_goes_on(
    start: Callable[..., Running],
) -> None:
    job = start("--ranks", "2", *ONLY_MEMORY, "5", "--memory-limit", "0.1", RECOVERABLE, "2")
    assert job.end() == 0, job.said
    assert "could not be saved, training goes on: the memory for checkpoints is full" in job.said
    assert "raise the limit to" in job.said


CHECKPOINT = "{every: 50, memory: {every: 2}}"


def played(
    tmp_path: Path, fault: str, strategy: str, parallelism: str = "ddp"
) -> tuple[Results, list[Event]]:
    """A run on two nodes, and the events of its faulted arm."""
    code, results = run(
        tmp_path,
        workload=f"{{kind: mlp, ranks: 4, steps: 120, global_batch: 16, checkpoint: {CHECKPOINT}, "
        f"parallelism: {parallelism}}}",
        recovery=strategy,
        faults=f"[{{id: f, at: {{step: 33}}, {fault}}}]",
        more="launcher: {kind: local, nodes: 2}\nsla: {steps_lost: ['max <= 4']}",
    )
    assert code == 0, results.reason
    (folder,) = (tmp_path / "runs" / "real" / "latest" / "events").glob("*faulted")
    return results, list(read_log(folder).events)


def restored(events: list[Event]) -> list[str]:
    """What generations began with."""
    return [
        e.data["checkpoint"]
        for e in events
        if e.kind is Kind.GENERATION_READY and e.data["checkpoint"]
    ]


@pytest.mark.real
def test_a_lost_node_costs_nothing_its_peer_has_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, socket_of = set[str](), Keepers.socket_of

    def noted(keepers: Keepers, node: int) -> str:
        names.add(f"@{socket_of(keepers, node)}")
        return socket_of(keepers, node)

    monkeypatch.setattr(Keepers, "socket_of", noted)
    _, events = played(tmp_path, "kind: node-kill, target: {node: 0}", "checkpoint-restart")
    ends = [e for e in events if e.kind is Kind.PROCESS_EXITED and e.data["process"] == "k0"]
    assert ends[0].data["signal"] == signal.SIGKILL and not ends[0].data["expected"]
    assert [is_memory(name) for name in restored(events)] == [True]
    left = next(e for e in events if e.kind is Kind.LEFTOVERS)
    assert not left.data["processes"] and names and not names & set(sockets().values())


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("strategy", ["drop-replica", "hot-spare"])
def test_a_sharded_model_of_which_there_is_one_copy_is_filled_from_memory(
    tmp_path: Path, strategy: str
) -> None:
    _, events = played(tmp_path, "kind: process-kill, target: {rank: 2}", strategy, "fsdp")
    assert [is_memory(name) for name in restored(events)] == [True]
    shards = {
        e.data["shard"] for e in events if e.kind is Kind.CHECKPOINT_COMMITTED and "shard" in e.data
    }
    assert shards == {0, 1, 2, 3}, "each rank saved its own"
