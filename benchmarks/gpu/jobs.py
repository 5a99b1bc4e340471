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


@dataclass(frozen=True)
class GpuRow:
    """A job of the recovery table. ``where``: in words; ``gpus``: at least; ``shards``: of the
    model; ``backend``, ``params``: see ``recovery.run``.
    """

    strategy: str
    where: str
    params: tuple[str, ...] = ()
    ranks: int = 2
    gpus: int = 1
    shards: int = 1
    backend: str = "auto"

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{' '.join((self.strategy, *self.params))}, {self.where}"

    @property
    def spares(self) -> int:
        """Besides its ranks."""
        return int(self.strategy == "hot-spare")

    def why_not(self, gpus: int, device: str) -> str:
        """Why it cannot be run here; else empty."""
        if self.backend == "nccl" and device == "cpu":
            return "NCCL needs a GPU"
        if self.gpus > gpus:
            return f"it needs {self.gpus} GPUs, there {'is' if gpus == 1 else 'are'} {gpus}"
        return ""


LIVE, REHEARSED = ("sync=live",), ("sync=live", "rehearse=true")
GLOO, SOCKETS = "two ranks on one GPU (gloo)", "two ranks on one GPU (NCCL over sockets)"
APART = "one rank a GPU (NCCL)"
ROWS = (
    *(GpuRow("hot-spare", GLOO, params) for params in ((), LIVE, REHEARSED)),
    GpuRow("drop-replica", GLOO),
    GpuRow("checkpoint-restart", GLOO),
    GpuRow("checkpoint-restart", "a model in two shards on one GPU (gloo)", shards=2),
    *(GpuRow("hot-spare", SOCKETS, params, backend="nccl") for params in ((), REHEARSED)),
    GpuRow("drop-replica", SOCKETS, backend="nccl"),
    GpuRow("checkpoint-restart", SOCKETS, backend="nccl"),
    GpuRow("checkpoint-restart", APART, ranks=1),
    GpuRow("hot-spare", APART, gpus=3),
    GpuRow("drop-replica", APART, gpus=2),
    GpuRow("checkpoint-restart", "a model in two shards, one a GPU (NCCL)", gpus=2, shards=2),
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
        self.row, self._events, self._said = row, folder / "events", folder / "output"
        self._tails: dict[str, EventLogTail] = {}
        self.commits: list[Event] = []
        self.failures: list[Event] = []
        self.pids: dict[str, int] = {}
        self.ready: set[str] = set()
        self.gone: set[str] = set()
        self.synced: set[str] = set()
        options = {
            "ranks": row.ranks,
            "shards": row.shards,
            "strategy": row.strategy,
            "device": device,
            "backend": row.backend,
            "events": self._events,
            "logs": folder / "logs",
            "checkpoint-dir": folder / "checkpoints",
            "every": EVERY,
            "keep": 1,
            **({"spares": row.spares} if row.spares else {}),
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        words += [f"--param={param}" for param in row.params]
        script = [str(ROOT / "benchmarks" / "gpu" / "train.py"), size, str(batch)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._said.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "trainchaos.recovery.run", *words, *script],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def done(self) -> int:
        """The newest step that a rank has committed."""
        return max((event.step or 0 for event in self.commits), default=0)

    def look(self) -> None:
        """Read events written since. Raises JobFailed if the job has ended."""
        for path in self._events.glob("*.jsonl") if self._events.is_dir() else ():
            for event in self._tails.setdefault(path.stem, EventLogTail(path)).read():
                self._note(event)
        if self._process.poll() is not None:
            words = self._said.read_text(errors="replace").strip().splitlines()
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

    def at(self, step: int) -> bool:
        """Whether all ranks have committed a step, and every spare is ready."""
        row, ready = self.row, self.ready - self.gone
        members = {
            event.actor
            for event in self.commits
            if (event.step or 0) >= step and event.data["world"] == row.ranks
        }
        if len(members) < row.ranks or len(ready) < row.ranks + row.spares:
            return False
        return not row.params or len((ready - members) & self.synced) >= row.spares

    def members(self) -> list[str]:
        """Processes that committed the newest step, by rank."""
        newest = self.done
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

    def step_times(self) -> list[float]:
        """Seconds between neighbouring commits of one process, incidents left out."""
        commits = sorted(self.commits, key=lambda event: (event.actor, event.time_ns))
        return [
            (after.time_ns - before.time_ns) / 1e9
            for before, after in itertools.pairwise(commits)
            if (before.actor, before.generation) == (after.actor, after.generation)
        ]

    def end(self) -> None:
        """Interrupt the job, and make sure that it ended."""
        self._process.terminate()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_LIMIT_S)


def play(row: GpuRow, device: str, size: str, batch: int, until_s: float) -> GpuMeasured:
    """Run one job with as many incidents as time allows."""
    measured = GpuMeasured()
    with tempfile.TemporaryDirectory() as folder:
        job = GpuJob(row, Path(folder), device, size, batch)
        try:
            for number in range(INCIDENTS):
                _incident(job, number, until_s, measured)
        except JobFailed as error:
            measured.note = str(error)
        finally:
            measured.steps = job.step_times()
            job.end()
    return measured


def _incident(job: GpuJob, number: int, until_s: float, measured: GpuMeasured) -> None:
    """Once the job trains, kill a rank, and wait for the first new step. Raises JobFailed if one of
    these does not come in time.
    """
    step, limit_s = job.done + REST_STEPS, min(until_s, time.monotonic() + STEP_LIMIT_S)
    while not job.at(step):
        if time.monotonic() > limit_s:
            raise JobFailed(f"step {step} did not come in time")
        time.sleep(0.01)
        job.look()
    members, failures, before = job.members(), len(job.failures), job.done
    moment = job.kill(members[number % len(members)])
    limit_s = min(until_s, time.monotonic() + STEP_LIMIT_S)
    while True:
        job.look()
        if len(job.failures) > failures:
            found = job.failures[failures].time_ns
            # Other ranks may still have committed the step in progress when the rank was killed.
            new = [e.time_ns for e in job.commits if (e.step or 0) > before and e.time_ns > found]
            if new:
                break
        if time.monotonic() > limit_s:
            raise JobFailed(f"no new step after incident {number + 1}")
        time.sleep(0.005)
    measured.detected.append((found - moment) / 1e9)
    measured.recovered.append((min(new) - moment) / 1e9)
