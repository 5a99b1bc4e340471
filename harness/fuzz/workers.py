"""A search by several processes, each with its own seed: starts them, reads their messages, ends
them, and merges their finds.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from trainchaos.harness.fuzz.draw.regressions import write_all
from trainchaos.harness.fuzz.play.coverage import Coverage
from trainchaos.harness.fuzz.play.play import memory
from trainchaos.harness.fuzz.worker import SIM, What

TELL_EVERY_S = 3.0
END_LIMIT_S = 5.0
END_FOR_REAL_S = 30.0
"""How long a worker may take to end the job that it plays, and to undo its effects."""
MOST_READ = 1 << 16
UNSTEADY = "unsteady"
"""Subdirectory for finds that were seen once."""
CORES_A_JOB = 4
"""Cores of a real job of up to as many ranks: two jobs on the same cores would only slow each
other.
"""


@dataclass(kw_only=True)
class SearchTally:
    """The workers' messages so far. ``runs``, ``refused``, ``again``: worker -> its newest number;
    ``finds``, ``once``: find, or find seen once -> its file; ``by``: find -> the worker that found
    it.
    """

    coverage: Coverage = field(default_factory=Coverage)
    runs: dict[int, int] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)
    finds: dict[str, Path] = field(default_factory=dict)
    once: dict[str, Path] = field(default_factory=dict)
    by: dict[str, int] = field(default_factory=dict)

    def line(self, since_s: float) -> str:
        """A line of progress, for people."""
        runs, refused = sum(self.runs.values()), sum(self.refused.values())
        rate = 60 * runs / since_s if since_s > 0 else 0.0
        reached = sum(number for _, number, _ in self.coverage.rows())
        once = f", {len(self.once)} seen once" if self.once else ""
        return (
            f"{runs} runs ({rate:.0f} a minute), {refused} refused by the loader, {reached} things"
            f" reached, {len(self.finds)} found{once}"
        )


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
    tally, interrupted, began, real = SearchTally(), False, time.monotonic(), launcher != SIM
    if real:
        jobs = _fewer(jobs, os.cpu_count() or 1, tell)
    common = {
        "strategy": strategy,
        "most_s": budget_s,
        "what": what,
        "launcher": launcher,
        "most_runs": most_runs,
    }
    limit_s = END_FOR_REAL_S if real else END_LIMIT_S
    place = None if real else memory()
    with (
        tempfile.TemporaryDirectory(
            prefix=f"fuzz-{os.getpid()}-", dir=place, ignore_cleanup_errors=True
        ) as root,
        _started({**common, "root": root}, seed, jobs, limit_s) as workers,
    ):
        ears = _Ears(workers=workers, tally=tally, into=into, tell=tell, began=began)
        try:
            ears.listen()
        except KeyboardInterrupt:
            interrupted = ears.ending = True
            for worker in workers.values():
                worker.terminate()
            ears.listen(time.monotonic() + limit_s)  # what they have found so far
    for text, number, once in tally.coverage.rows():
        tell(f"  {text}: {number} reached, {once} of them by one worker only")
    tell(
        tally.line(time.monotonic() - began) + (" until it was interrupted" if interrupted else "")
    )
    for key, path in tally.finds.items():
        tell(f"  {path}: {key}")
    for key, path in tally.once.items():
        tell(f"  seen once: {path}: {key}")
    return len(tally.finds), interrupted


def _fewer(jobs: int, cores: int, tell: Callable[[str], None]) -> int:
    most = max(1, cores // CORES_A_JOB)
    if jobs > most:
        tell(
            f"--jobs {jobs}: {most} at a time, as each takes {CORES_A_JOB} cores and this machine"
            f" has {cores}"
        )
    return min(jobs, most)


@contextlib.contextmanager
def _started(
    common: Mapping[str, Any], seed: int, jobs: int, limit_s: float
) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    workers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for number in range(jobs):
            mine = {**common, "seed": f"{seed}.{number}"}
            workers[number] = subprocess.Popen(
                [sys.executable, "-m", "trainchaos", "fuzz", "--worker", json.dumps(mine)],
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


@dataclass(kw_only=True)
class _Ears:
    """Reads the workers' messages and writes their finds. ``ending``: they were ordered to end."""

    workers: Mapping[int, subprocess.Popen[bytes]]
    tally: SearchTally
    into: Path
    tell: Callable[[str], None]
    began: float
    ending: bool = False
    _rest: dict[int, bytes] = field(default_factory=dict)

    def listen(self, until_s: float = math.inf) -> None:
        """Read until all workers have ended, at most until ``until_s``."""
        with selectors.DefaultSelector() as selector:
            for number, worker in self.workers.items():
                selector.register(_stdout(worker), selectors.EVENT_READ, number)
            next_s = time.monotonic() + TELL_EVERY_S
            while selector.get_map() and time.monotonic() < until_s:
                for key, _ in selector.select(max(0.0, next_s - time.monotonic())):
                    if not self._read(key.data, key.fd):
                        selector.unregister(key.fileobj)
                if time.monotonic() >= next_s:
                    next_s += TELL_EVERY_S
                    self.tell(self.tally.line(time.monotonic() - self.began))

    def _read(self, number: int, fd: int) -> bool:
        """Process the messages received; False if the worker has ended."""
        more = os.read(fd, MOST_READ)
        self._rest[number] = self._rest.get(number, b"") + more
        while b"\n" in self._rest[number]:
            line, _, rest = self._rest[number].partition(b"\n")
            self._hear(number, json.loads(line))
            self._rest[number] = rest  # only now: an interrupted line is processed again
        if not more and (code := self.workers[number].wait(END_LIMIT_S)) and not self.ending:
            self.tell(f"worker {number} ended with {code}")
        return bool(more)

    def _hear(self, number: int, message: Mapping[str, Any]) -> None:
        tally = self.tally
        if "find" not in message:
            tally.runs[number], tally.refused[number] = message["runs"], message["refused"]
            tally.again[number] = message["again"]
            tally.coverage.add([tuple(feature) for feature in message["reached"]])
            return
        key = message["find"]
        if not message["steady"]:
            if key not in tally.once and key not in tally.finds:
                tally.once[key] = self._write(self.into / UNSTEADY, message)
                self.tell(f"seen once: {key}\n  {tally.once[key]}")
            return
        if tally.by.setdefault(key, number) != number:
            return
        path = self._write(self.into, message)
        before = [tally.once.pop(key, None), tally.finds.get(key)]
        for old in before:
            if old is not None and old != path:
                old.unlink(missing_ok=True)
        tally.finds[key] = path
        self.tell(f"{'made small' if before[1] else 'found'}: {key}\n  {path}")

    def _write(self, into: Path, message: Mapping[str, Any]) -> Path:
        return write_all(
            into, {name: base64.b64decode(data) for name, data in message["files"].items()}
        )


def _stdout(worker: subprocess.Popen[bytes]) -> IO[bytes]:
    assert worker.stdout is not None
    return worker.stdout
