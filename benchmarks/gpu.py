"""Makes docs/gpu-results.md within ten minutes on a machine with a GPU.

    python -m benchmarks.gpu [--device cuda] [--size 124m] [--minutes 9] [--out docs/gpu-results.md]

Runs jobs of ``recovery.run`` whose ranks are killed, and measures single parts in separate
processes. Parts skipped for lack of time are listed. ``--device cpu --size tiny`` rehearses it
without a GPU. Needs pydantic besides torch, numpy and xxhash, and no network. Exit status: 0 done,
1 a part failed, 7 no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from chaos.errors import EXIT_FAIL, EXIT_PASS, EXIT_SKIPPED
from chaos.events.following import EventLogTail
from chaos.events.log import ORCHESTRATOR, Event, Kind

ROOT = Path(__file__).resolve().parent.parent
PART_LIMIT_S = 100.0
JOBS_SHARE = 0.7  # share of the time for jobs; the rest is for parts
STEP_LIMIT_S = 90.0  # longest wait for a job's next step, its start included
END_LIMIT_S = 30.0
INCIDENTS = 5
REST_STEPS = 4  # between an incident and the next
EVERY = 3  # steps between checkpoints


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """A job of the recovery table. ``spares``: besides ``ranks``; ``gpus``: at least; ``shards``:
    of the model.
    """

    name: str
    strategy: str
    ranks: int
    spares: int = 0
    gpus: int = 1
    shards: int = 1


ROWS = (
    GpuRow(name="hot-spare, two ranks on one GPU (gloo)", strategy="hot-spare", ranks=2, spares=1),
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
        command = [
            sys.executable,
            "-m",
            "recovery.run",
            "--ranks",
            str(row.ranks),
            "--shards",
            str(row.shards),
            "--strategy",
            row.strategy,
            *(["--spares", str(row.spares)] if row.strategy == "hot-spare" else []),
            "--device",
            device,
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
            str(ROOT / "benchmarks" / "gpu_train.py"),
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
        whole = [
            event
            for event in self.commits
            if (event.step or 0) >= step and event.data["world"] == row.ranks
        ]
        return bool(whole) and len(self.ready - self.gone) >= row.ranks + row.spares

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


def spread(values: Sequence[float], *, unit: float = 1.0, digits: int = 3) -> str:
    """n, median, and the smallest and largest."""
    if not values:
        return "0 | - | -"
    shown = [value * unit for value in values]
    return (
        f"{len(shown)} | {statistics.median(shown):.{digits}f} | {min(shown):.{digits}f} to"
        f" {max(shown):.{digits}f}"
    )


def part(name: str, device: str, size: str, until_s: float) -> tuple[dict[str, Any], str]:
    """Measurements of a part, made in a separate process; or why they failed."""
    left_s = min(PART_LIMIT_S, until_s - time.monotonic())
    if left_s < 1:
        return {}, "not run: no time left"
    index = f"{device}:0" if device == "cuda" else device
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu_parts", name, index, size],
            cwd=ROOT,
            timeout=left_s,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"not done within {left_s:.0f} s"
    lines = ran.stdout.strip().splitlines()
    if ran.returncode or not lines:
        return {}, f"failed: {(ran.stderr.strip().splitlines() or ['?'])[-1]}"
    found: dict[str, Any] = json.loads(lines[-1])
    return found, ""


def page(
    device: str,
    size: str,
    batch: int,
    about: dict[str, Any],
    parts: dict[str, tuple[dict[str, Any], str]],
    jobs: dict[str, GpuMeasured],
    skipped: dict[str, str],
) -> str:
    """The whole of docs/gpu-results.md. ``skipped``: job -> why it was not run."""
    what = ", ".join(f"{name} {value}" for name, value in about.items())
    lines = [
        "# Results on GPUs",
        "",
        f"Made by `make bench-gpu` ({datetime.now(UTC):%Y-%m-%d %H:%M} UTC). {driver()}{what}.",
    ]
    if device == "cpu":
        lines += [
            "",
            "**A rehearsal without a GPU: gloo on the CPU. None of these figures is of a GPU.**",
        ]
    lines += [
        "",
        "Seconds unless said otherwise; n, median, smallest to largest.",
        "",
        "## Recovery",
        "",
        (
            f"Model {size}, global batch {batch}, AdamW, a checkpoint every {EVERY} steps, SIGKILL"
            " at a step boundary."
        ),
        "",
        "| job | step | | | SIGKILL to detection | | | SIGKILL to the next new step | | |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, job in jobs.items():
        lines.append(
            f"| {name} | {spread(job.steps)} | {spread(job.detected)} | {spread(job.recovered)} |"
        )
    lines += [f"- {name}: {job.note}" for name, job in jobs.items() if job.note]
    lines += [f"- Not run: {name}: {why}" for name, why in skipped.items()]
    lines += [
        "",
        "## One process",
        "",
        "| what | n | median | smallest to largest |",
        "| --- | --- | --- | --- |",
    ]
    words = {
        "form_s": "form a group of one",
        "first_s": "its first all-reduce (4 MiB)",
        "abort_s": "abort while the device is busy, until the training thread is free",
        "plain_step_s": f"a step, {size}, plain torch",
        "step_s": "the same step with the job's reducer",
        "digest_s": "digests of the whole state, for the log",
        "fingerprint_s": "fingerprint, to compare replicas",
        "finite_s": "look for values that are not finite, before a save",
    }
    for found, _ in parts.values():
        lines += [
            f"| {text} | {spread(found[key], digits=5)} |"
            for key, text in words.items()
            if key in found
        ]
    if "bytes" in parts["state"][0]:
        lines.append(f"\nThe state: {parts['state'][0]['bytes'] / 1e9:.2f} GB.")
    lines += ["", "## Faults that change tensors", ""]
    landed = parts["faults"][0].get("landed", {})
    missed = [name for name, yes in landed.items() if not yes]
    where = " and ".join(parts["faults"][0].get("where", []))
    lines.append(
        f"{len(landed) - len(missed)} of {len(landed)} landed on {where} tensors, by the rank's own"
        f" digests{'; not ' + ', '.join(missed) if missed else ''}."
    )
    lines += [f"\n{name}: {reason}." for name, (_, reason) in parts.items() if reason]
    return "\n".join(lines) + "\n"


def why_not(row: GpuRow, gpus: int, sharding: str) -> str:
    """Why a job cannot be run here; else empty. ``sharding``: why this torch cannot shard
    a model.
    """
    if row.gpus > gpus:
        return f"it needs {row.gpus} GPUs, there {'is' if gpus == 1 else 'are'} {gpus}"
    return sharding if row.shards > 1 else ""


def driver() -> str:
    """The driver version from nvidia-smi."""
    try:
        ran = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return f"driver {ran.stdout.split()[0]}, " if ran.returncode == 0 and ran.stdout.split() else ""


def gpus() -> int:
    """Number of GPUs seen by torch, asked in another process, as this one must not touch them."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    return int(ran.stdout.strip() or 0) if ran.returncode == 0 else 0


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    usage = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    usage.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    usage.add_argument("--size", choices=("124m", "tiny"), default="124m")
    usage.add_argument("--minutes", type=float, default=9.0)
    usage.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu-results.md")
    given = usage.parse_args(argv)
    until_s = time.monotonic() + 60 * given.minutes
    count = gpus() if given.device == "cuda" else 1
    if not count:
        print("bench-gpu: skipped: torch sees no CUDA device here", file=sys.stderr)
        return EXIT_SKIPPED
    batch = 8
    about, reason = part("machine", given.device, given.size, until_s)
    jobs: dict[str, GpuMeasured] = {}
    sharding = about.pop("sharding", reason)
    skipped = {row.name: why for row in ROWS if (why := why_not(row, count, sharding))}
    rows = [row for row in ROWS if row.name not in skipped]
    jobs_until_s = time.monotonic() + JOBS_SHARE * (until_s - time.monotonic())
    for place, row in enumerate(rows):
        share_s = max(0.0, jobs_until_s - time.monotonic()) / (len(rows) - place)
        print(f"{datetime.now(UTC):%H:%M:%S} {row.name}", file=sys.stderr, flush=True)
        jobs[row.name] = play(row, given.device, given.size, batch, time.monotonic() + share_s)
    parts = {
        name: part(name, given.device, given.size, until_s) for name in ("faults", "nccl", "state")
    }
    text = page(given.device, given.size, batch, about, parts, jobs, skipped)
    given.out.write_text(text)
    print(text)
    failed = (
        reason or any(why for _, why in parts.values()) or any(job.note for job in jobs.values())
    )
    return EXIT_FAIL if failed else EXIT_PASS


if __name__ == "__main__":
    sys.exit(main())
