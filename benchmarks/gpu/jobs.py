"""Jobs of ``recovery.run`` whose ranks are killed, and what is measured of them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.chaos.events.following import EventLogTail
from trainchaos.chaos.events.log import ORCHESTRATOR, Event, Kind

ROOT = Path(__file__).resolve().parents[2]
STEP_LIMIT_S = 90.0  # longest wait for a job's next step, its start included
END_LIMIT_S = 30.0
INCIDENTS = 5
REST_STEPS = 4  # between an incident and the next
EVERY = 3  # steps between checkpoints


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """A job of the recovery table. ``spares``: besides ``ranks``; ``gpus``: at least; ``shards``:
    of the model; ``backend``, ``params``: see ``recovery.run``.
    """

    name: str
    strategy: str
    ranks: int
    spares: int = 0
    gpus: int = 1
    shards: int = 1
    backend: str = "auto"
    params: tuple[str, ...] = ()


ROWS = (
    GpuRow(name="hot-spare, two ranks on one GPU (gloo)", strategy="hot-spare", ranks=2, spares=1),
    GpuRow(
        name="hot-spare sync=live, two ranks on one GPU (gloo)",
        strategy="hot-spare",
        ranks=2,
        spares=1,
        params=("sync=live",),
    ),
    GpuRow(
        name="hot-spare sync=live rehearse=true, two ranks on one GPU (gloo)",
        strategy="hot-spare",
        ranks=2,
        spares=1,
        params=("sync=live", "rehearse=true"),
    ),
    GpuRow(name="drop-replica, two ranks on one GPU (gloo)", strategy="drop-replica", ranks=2),
    GpuRow(
        name="checkpoint-restart, two ranks on one GPU (gloo)",
        strategy="checkpoint-restart",
        ranks=2,
    ),
    GpuRow(
        name="checkpoint-restart, a model in two shards on one GPU (gloo)",
        strategy="checkpoint-restart",
        ranks=2,
        shards=2,
    ),
    GpuRow(
        name="hot-spare, two ranks on one GPU (NCCL over sockets)",
        strategy="hot-spare",
        ranks=2,
        spares=1,
        backend="nccl",
    ),
    GpuRow(
        name="hot-spare sync=live rehearse=true, two ranks on one GPU (NCCL over sockets)",
        strategy="hot-spare",
        ranks=2,
        spares=1,
        backend="nccl",
        params=("sync=live", "rehearse=true"),
    ),
    GpuRow(
        name="drop-replica, two ranks on one GPU (NCCL over sockets)",
        strategy="drop-replica",
        ranks=2,
        backend="nccl",
    ),
    GpuRow(
        name="checkpoint-restart, two ranks on one GPU (NCCL over sockets)",
        strategy="checkpoint-restart",
        ranks=2,
        backend="nccl",
    ),
    GpuRow(
        name="checkpoint-restart, one rank a GPU (NCCL)", strategy="checkpoint-restart", ranks=1
    ),
    GpuRow(
        name="hot-spare, one rank a GPU (NCCL)", strategy="hot-spare", ranks=2, spares=1, gpus=3
    ),
    GpuRow(name="drop-replica, one rank a GPU (NCCL)", strategy="drop-replica", ranks=2, gpus=2),
    GpuRow(
        name="checkpoint-restart, a model in two shards, one a GPU (NCCL)",
        strategy="checkpoint-restart",
        ranks=2,
        gpus=2,
        shards=2,
    ),
)


@dataclass(kw_only=True)
class GpuMeasured:
    """Seconds of a job: step times, SIGKILL to detection, and SIGKILL to the next new step;
    ``note``: what went wrong.
    """

    steps: list[float] = field(default_factory=list)
    detected: list[float] = field(default_factory=list)
    recovered: list[float] = field(default_factory=list)
    note: str = ""


class JobFailed(Exception):
    """A job did not reach its goal in time."""


class GpuJob:
    """A job under ``recovery.run``, followed by its event logs."""

    def __init__(self, row: GpuRow, folder: Path, device: str, size: str, batch: int) -> None:
        self._events = folder / "events"
        self._output = (folder / "output").open("wb")
        self._tails: dict[str, EventLogTail] = {}
        self.commits: list[Event] = []
        self.failures: list[Event] = []
        self.pids: dict[str, int] = {}
        self.ready: set[str] = set()
        self.gone: set[str] = set()
        self.synced: set[str] = set()
        command = [
            sys.executable,
            "-m",
            "trainchaos.recovery.run",
            "--ranks",
            str(row.ranks),
            "--shards",
            str(row.shards),
            "--strategy",
            row.strategy,
            *(["--spares", str(row.spares)] if row.strategy == "hot-spare" else []),
            *(word for param in row.params for word in ("--param", param)),
            "--device",
            device,
            "--backend",
            row.backend,
            "--events",
            str(self._events),
            "--logs",
            str(folder / "logs"),
            "--checkpoint-dir",
            str(folder / "checkpoints"),
            "--every",
            str(EVERY),
            "--keep",
            "1",
            str(ROOT / "benchmarks" / "gpu" / "train.py"),
            size,
            str(batch),
        ]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )
        self._folder = folder

    def look(self) -> None:
        """Read events written since. Raises JobFailed if the job has ended."""
        for path in self._events.glob("*.jsonl") if self._events.is_dir() else ():
            for event in self._tails.setdefault(path.stem, EventLogTail(path)).read():
                self._note(event)
        if self._process.poll() is not None:
            words = (self._folder / "output").read_text(errors="replace").strip().splitlines()
            raise JobFailed(f"it ended with {self._process.returncode}: {' / '.join(words[-3:])}")

    def _note(self, event: Event) -> None:
        if event.kind is Kind.STEP_COMMITTED:
            self.commits.append(event)
        elif event.kind is Kind.SPARE_SYNCED:
            self.synced.add(event.actor)
        elif event.actor != ORCHESTRATOR:
            return
        elif event.kind is Kind.FAILURE_DETECTED:
            self.failures.append(event)
        elif event.kind is Kind.PROCESS_SPAWNED:
            self.pids[event.data["process"]] = event.data["pid"]
        elif event.kind is Kind.PROCESS_READY:
            self.ready.add(event.data["process"])
        elif event.kind is Kind.PROCESS_EXITED:
            self.gone.add(event.data["process"])

    def until(self, row: GpuRow, step: int, until_s: float) -> None:
        """Wait for a step of all ranks, with every spare ready. Raises JobFailed if it does not
        come in time.
        """
        limit_s = min(until_s, time.monotonic() + STEP_LIMIT_S)
        while not self._at(row, step):
            if time.monotonic() > limit_s:
                raise JobFailed(f"step {step} did not come in time")
            time.sleep(0.01)
            self.look()

    def _at(self, row: GpuRow, step: int) -> bool:
        members = {
            event.actor
            for event in self.commits
            if (event.step or 0) >= step and event.data["world"] == row.ranks
        }
        ready = self.ready - self.gone
        if len(members) < row.ranks or len(ready) < row.ranks + row.spares:
            return False
        waiting = ready - members
        return "sync=live" not in row.params or len(waiting & self.synced) >= row.spares

    def members(self) -> list[str]:
        """Processes that committed the newest step, by rank."""
        newest = max(event.step or 0 for event in self.commits)
        found = {event.data["rank"]: event.actor for event in self.commits if event.step == newest}
        return [found[rank] for rank in sorted(found)]

    def kill(self, process: str) -> int:
        """Kill a process with SIGKILL through its pidfd; returns the time in nanoseconds of the
        logs' clock.
        """
        descriptor = os.pidfd_open(self.pids[process])
        try:
            moment = time.monotonic_ns()
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)
        return moment

    def end(self) -> None:
        """Interrupt the job, and make sure that it ended."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(END_LIMIT_S)
        self._output.close()


def play(row: GpuRow, device: str, size: str, batch: int, until_s: float) -> GpuMeasured:
    """Run one job with as many incidents as time allows."""
    measured = GpuMeasured()
    with tempfile.TemporaryDirectory() as folder:
        job = GpuJob(row, Path(folder), device, size, batch)
        try:
            for number in range(INCIDENTS):
                done = max((event.step or 0 for event in job.commits), default=0)
                job.until(row, done + REST_STEPS, until_s)
                _incident(job, row, number, until_s, measured)
        except JobFailed as error:
            measured.note = str(error)
        finally:
            measured.steps = _steps(job)
            job.end()
    return measured


def _incident(job: GpuJob, row: GpuRow, number: int, until_s: float, measured: GpuMeasured) -> None:
    """Kill a rank, and wait for the first new step."""
    members = job.members()
    failures = len(job.failures)
    before = max(event.step or 0 for event in job.commits)
    moment = job.kill(members[number % len(members)])
    limit_s = min(until_s, time.monotonic() + STEP_LIMIT_S)
    while True:
        job.look()
        # Other ranks may still have committed the step in progress when the rank was killed.
        later = [e for e in job.commits if (e.step or 0) > before and e.time_ns > moment]
        if (
            later
            and len(job.failures) > failures
            and later[-1].time_ns > job.failures[failures].time_ns
        ):
            break
        if time.monotonic() > limit_s:
            raise JobFailed(f"no new step after incident {number + 1}")
        time.sleep(0.005)
    found = job.failures[failures].time_ns
    new = min(e.time_ns for e in later if e.time_ns > found)
    measured.detected.append((found - moment) / 1e9)
    measured.recovered.append((new - moment) / 1e9)


def _steps(job: GpuJob) -> list[float]:
    """Seconds between neighbouring commits of one process, incidents left out."""
    times: dict[str, list[Event]] = {}
    for event in job.commits:
        times.setdefault(event.actor, []).append(event)
    return [
        (after.time_ns - before.time_ns) / 1e9
        for events in times.values()
        for before, after in itertools.pairwise(events)
        if before.generation == after.generation
    ]


# ---- the page


def why_not(row: GpuRow, gpus: int, device: str) -> str:
    """Why a job cannot be run here; else empty."""
    if row.backend == "nccl" and device == "cpu":
        return "NCCL needs a GPU"
    if row.gpus > gpus:
        return f"it needs {row.gpus} GPUs, there {'is' if gpus == 1 else 'are'} {gpus}"
    return ""
