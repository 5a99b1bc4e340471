"""A search by several processes, each with its own seed: starts them, reads their messages, ends
them, and merges their finds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainchaos.chaos.files import replacing
from trainchaos.harness.fuzz.play.coverage import Coverage
from trainchaos.harness.fuzz.play.play import memory
from trainchaos.harness.fuzz.worker import SIM, What

TELL_EVERY_S = 3.0
END_LIMIT_S = 5.0
END_FOR_REAL_S = 30.0
"""How long a worker may take to end the job that it plays, and to undo its effects."""
UNSTEADY = "unsteady"
"""Subdirectory for finds that were seen once."""
CORES_A_JOB = 4
"""Cores of a real job of up to as many ranks: two jobs on the same cores would only slow each
other.
"""
Workers = Mapping[int, "subprocess.Popen[bytes]"]


@dataclass(kw_only=True)
class SearchTally:
    """The workers' messages so far, and the files of their finds below ``into``. ``counts``: of
    runs and refusals, worker -> its newest number; ``finds``, ``once``: find, or find seen once ->
    its file; ``by``: find -> the worker that found it.
    """

    into: Path
    tell: Callable[[str], None]
    began_s: float = field(default_factory=time.monotonic)
    coverage: Coverage = field(default_factory=Coverage)
    counts: dict[str, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    finds: dict[str, Path] = field(default_factory=dict)
    once: dict[str, Path] = field(default_factory=dict)
    by: dict[str, int] = field(default_factory=dict)

    def line(self) -> str:
        """A line of progress, for people."""
        runs, refused = (sum(self.counts[what].values()) for what in ("runs", "refused"))
        since_s = time.monotonic() - self.began_s
        rate = 60 * runs / since_s if since_s > 0 else 0.0
        reached = sum(number for _, number, _ in self.coverage.rows())
        once = f", {len(self.once)} seen once" if self.once else ""
        return (
            f"{runs} runs ({rate:.0f} a minute), {refused} refused by the loader, {reached} things"
            f" reached, {len(self.finds)} found{once}"
        )

    def hear(self, worker: int, message: Mapping[str, Any]) -> None:
        """Count a worker's progress, or write its find."""
        if "find" not in message:
            for what in ("runs", "refused"):
                self.counts[what][worker] = message[what]
            self.coverage.add([tuple(feature) for feature in message["reached"]])
            return
        key, before = message["find"], self.finds.get(message["find"])
        if not message["steady"]:
            if key not in self.once and before is None:
                self.once[key] = self._write(UNSTEADY, message)
                self.tell(f"seen once: {key}\n  {self.once[key]}")
            return
        if self.by.setdefault(key, worker) != worker:
            return
        path = self.finds[key] = self._write(".", message)
        for old in (self.once.pop(key, None), before):
            if old is not None and old != path:
                old.unlink(missing_ok=True)
        self.tell(f"{'made small' if before else 'found'}: {key}\n  {path}")

    def _write(self, folder: str, message: Mapping[str, Any]) -> Path:
        path = self.into / folder / message["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as stream:
            stream.write(message["text"].encode(errors="replace"))
        return path


def search(
    *,
    strategy: str | None,
    budget_s: float,
    seed: int,
    jobs: int,
    into: Path,
    tell: Callable[[str], None],
    what: What = "recovery",
    launcher: str = SIM,
    most_runs: int | None = None,
) -> tuple[int, bool]:
    """Search with ``jobs`` processes for ``budget_s`` seconds, or until each has tried
    ``most_runs``. Returns how many defects were found, and whether it was interrupted. A worker
    that dies is reported, and the others continue. With a launcher other than the simulator there
    are at most as many workers as the machine has cores for; a reduction is reported.
    """
    tally, real = SearchTally(into=into, tell=tell), launcher != SIM
    cores = os.cpu_count() or 1
    if real and jobs > (most := max(1, cores // CORES_A_JOB)):
        each = f"as each takes {CORES_A_JOB} cores and this machine has {cores}"
        tell(f"--jobs {jobs}: {most} at a time, {each}")
        jobs = most
    limit_s = END_FOR_REAL_S if real else END_LIMIT_S
    prefix, place = f"fuzz-{os.getpid()}-", None if real else memory()
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place, ignore_cleanup_errors=True) as root:
        asked = {
            "strategy": strategy,
            "most_s": budget_s,
            "what": what,
            "launcher": launcher,
            "most_runs": most_runs,
            "root": root,
        }
        with _started(asked, seed, jobs, limit_s) as workers:
            interrupted = _listen(workers, tally, limit_s)
    for text, number, once in tally.coverage.rows():
        tell(f"  {text}: {number} reached, {once} of them by one worker only")
    tell(tally.line() + (" until it was interrupted" if interrupted else ""))
    for key, path in tally.finds.items():
        tell(f"  {path}: {key}")
    for key, path in tally.once.items():
        tell(f"  seen once: {path}: {key}")
    return len(tally.finds), interrupted


@contextlib.contextmanager
def _started(asked: Mapping[str, Any], seed: int, jobs: int, limit_s: float) -> Iterator[Workers]:
    workers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for number in range(jobs):
            mine = json.dumps({**asked, "seed": f"{seed}.{number}"})
            workers[number] = subprocess.Popen(
                [sys.executable, "-m", "trainchaos", "fuzz", "--worker", mine],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        yield workers
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            try:
                worker.wait(limit_s)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait(END_LIMIT_S)


def _listen(workers: Workers, tally: SearchTally, limit_s: float) -> bool:
    """Hear the workers until all have ended; Ctrl-C ends them, which may take ``limit_s`` and may
    bring what they have found so far. Returns whether it was interrupted.
    """
    lines: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    until_s, working = math.inf, set(workers)

    def read(number: int) -> None:
        for line in workers[number].stdout or ():
            if line.endswith(b"\n"):  # one that died leaves half of a line
                lines.put((number, line))
        lines.put((number, b""))

    def interrupt(*_: Any) -> None:
        nonlocal until_s
        until_s = min(until_s, time.monotonic() + limit_s)
        for worker in workers.values():
            worker.terminate()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for number in workers:
            threading.Thread(target=read, args=(number,), daemon=True).start()
        next_s = time.monotonic() + TELL_EVERY_S
        while working and time.monotonic() < until_s:
            with contextlib.suppress(queue.Empty):
                number, line = lines.get(timeout=max(0.0, next_s - time.monotonic()))
                if line:
                    tally.hear(number, json.loads(line))
                else:
                    working.remove(number)
                    if (code := workers[number].wait(END_LIMIT_S)) and until_s == math.inf:
                        tally.tell(f"worker {number} ended with {code}")
            if time.monotonic() >= next_s:
                next_s += TELL_EVERY_S
                tally.tell(tally.line())
    finally:
        signal.signal(signal.SIGINT, before)
    return until_s < math.inf
