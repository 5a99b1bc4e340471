"""A search by several processes, each with a seed of its own: started, listened to, ended; their finds put together."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from chaos.catalogue import Catalogue
from harness.fuzz.bench import Bench
from harness.fuzz.coverage import Coverage
from harness.fuzz.draw import World
from harness.fuzz.judge import JudgeSearch
from harness.fuzz.loader import LoaderSearch
from harness.fuzz.play import Player, kinds, memory, strategies
from harness.fuzz.reading import Reader
from harness.fuzz.regressions import write_all
from harness.fuzz.search import Search, Searching

What = Literal["recovery", "loader", "judge"]
TELL_EVERY_S = 3.0
END_LIMIT_S = 5.0
MOST_READ = 1 << 16
REPORT_EVERY_S = 1.0
"""So often a worker says how far it is."""


@dataclass(kw_only=True)
class Tally:
    """What the workers have said. ``runs``, ``refused``, ``again``: worker -> its newest number."""

    coverage: Coverage = field(default_factory=Coverage)
    runs: dict[int, int] = field(default_factory=dict)
    refused: dict[int, int] = field(default_factory=dict)
    again: dict[int, int] = field(default_factory=dict)
    finds: dict[str, Path] = field(default_factory=dict)

    def line(self, since_s: float) -> str:
        """For people."""
        runs, refused = sum(self.runs.values()), sum(self.refused.values())
        rate = 60 * runs / since_s if since_s > 0 else 0.0
        reached = sum(number for _, number, _ in self.coverage.rows())
        return (
            f"{runs} runs ({rate:.0f} a minute), {refused} refused by the loader, {reached} things reached, "
            f"{len(self.finds)} found"
        )


# ---- in a worker


def work(
    catalogue: Catalogue, strategy: str | None, seed: str, most_s: float, root: str, what: What = "recovery"
) -> None:
    """Search until the time is over, or whoever started this is gone; each line of standard output is a message.
    ``root``: for files, which whoever started this removes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: whoever started this ends it
    world = World(kinds=kinds(), strategies=strategies(), strategy=strategy)
    search = _search(catalogue, world, seed, Path(root), what)
    told: set[tuple[str, ...]] = set()
    until_s, parent = time.monotonic() + most_s, os.getppid()
    next_s = 0.0
    while time.monotonic() < until_s and os.getppid() == parent:
        found = search.step()
        if found is not None:
            files = {name: base64.b64encode(data).decode() for name, data in found.files().items()}
            _say({"find": found.find.key, "files": files})
        if found is not None or time.monotonic() >= next_s:
            told, next_s = _report(search, told), time.monotonic() + REPORT_EVERY_S
    _report(search, told)


def _search(catalogue: Catalogue, world: World, seed: str, root: Path, what: What) -> Searching:
    """What is searched in one process."""
    if what == "loader":
        return LoaderSearch(world=world, reader=Reader(catalogue=catalogue, root=root), seed=seed)
    player = Player(catalogue=catalogue, root=root)
    if what == "judge":
        return JudgeSearch(world=world, player=player, bench=Bench(root=root), seed=seed)
    return Search(world=world, player=player, seed=seed)


def _report(search: Searching, told: set[tuple[str, ...]]) -> set[tuple[str, ...]]:
    reached = set(search.coverage.times)
    new = [list(feature) for feature in sorted(reached - told)]
    _say({"runs": search.runs, "refused": search.refused, "again": search.again, "reached": new})
    return reached


def _say(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


# ---- whoever starts them


def search(
    *,
    strategy: str | None,
    budget_s: float,
    seed: int,
    jobs: int,
    into: Path,
    tell: Callable[[str], None],
    what: What = "recovery",
) -> tuple[int, bool]:
    """Search with ``jobs`` processes for ``budget_s`` seconds. Returns how many defects were found, and whether it was
    interrupted. A worker that dies is named, and the others go on."""
    tally, interrupted, began = Tally(), False, time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory(), ignore_cleanup_errors=True) as root,
        _started(
            {"strategy": strategy, "most_s": budget_s, "root": root, "what": what}, seed, jobs
        ) as workers,
    ):
        try:
            _listen(workers, tally, into, tell, began)
        except KeyboardInterrupt:
            interrupted = True
    for text, number, once in tally.coverage.rows():
        tell(f"  {text}: {number} reached, {once} of them by one worker only")
    tell(tally.line(time.monotonic() - began) + (" until it was interrupted" if interrupted else ""))
    for key, path in tally.finds.items():
        tell(f"  {path}: {key}")
    return len(tally.finds), interrupted


@contextlib.contextmanager
def _started(common: Mapping[str, Any], seed: int, jobs: int) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    workers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for number in range(jobs):
            mine = {**common, "seed": f"{seed}.{number}"}
            workers[number] = subprocess.Popen(
                [sys.executable, "-m", "chaos", "fuzz", "--worker", json.dumps(mine)],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        yield workers
    finally:
        for worker in workers.values():
            worker.terminate()
        for worker in workers.values():
            try:
                worker.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait(END_LIMIT_S)


def _listen(
    workers: Mapping[int, subprocess.Popen[bytes]],
    tally: Tally,
    into: Path,
    tell: Callable[[str], None],
    began: float,
) -> None:
    rest = dict.fromkeys(workers, b"")
    with selectors.DefaultSelector() as selector:
        for number, worker in workers.items():
            selector.register(_stdout(worker), selectors.EVENT_READ, number)
        next_s = began + TELL_EVERY_S
        while selector.get_map():
            for key, _ in selector.select(max(0.0, next_s - time.monotonic())):
                number = key.data
                if not (more := os.read(key.fd, MOST_READ)):
                    selector.unregister(key.fileobj)
                    if code := workers[number].wait(END_LIMIT_S):
                        tell(f"worker {number} ended with {code}")
                    continue
                *lines, rest[number] = (rest[number] + more).split(b"\n")
                for line in lines:
                    _hear(number, json.loads(line), tally, into, tell)
            if time.monotonic() >= next_s:
                next_s += TELL_EVERY_S
                tell(tally.line(time.monotonic() - began))


def _stdout(worker: subprocess.Popen[bytes]) -> IO[bytes]:
    assert worker.stdout is not None
    return worker.stdout


def _hear(
    number: int, message: Mapping[str, Any], tally: Tally, into: Path, tell: Callable[[str], None]
) -> None:
    if "find" not in message:
        tally.runs[number], tally.refused[number] = message["runs"], message["refused"]
        tally.again[number] = message["again"]
        tally.coverage.add([tuple(feature) for feature in message["reached"]])
        return
    key = message["find"]
    if key in tally.finds:
        return
    files = {name: base64.b64decode(data) for name, data in message["files"].items()}
    tally.finds[key] = write_all(into, files)
    tell(f"found: {key}\n  {tally.finds[key]}")
