"""Requirements on the loader for any file, however spoilt: it loads and can be planned, or is
refused with a clear, short text.

- Only ScenarioError is raised. Its text names the file, contains no terminal control characters and
  only lines that belong to an error, and has at most ``MOST_SAID`` characters per error, of which
  at most fifty are shown.
- Loading takes at most ``MOST_CPU_S`` of processor time (not wall time: machines are busy),
  planning as much, and ``MOST_GROWN`` bytes of memory.
- The same file gives the same result twice.
- A scenario that loads is the same when it is read again from its resolved form.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import LoadedScenario, load
from trainchaos.chaos.planning.planview import as_json, as_text, plan_run
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.chaos.scenario.model import ResolvedRun
from trainchaos.harness.fuzz.play.oracle import Find, plain
from trainchaos.harness.fuzz.play.play import ArmTimeout, memory, place_of, traceback_tail
from trainchaos.harness.host.rundir import RunDirectory, read_resolved, write_resolved

MOST_SAID = 2_000
MOST_TOLD = 50
MOST_CPU_S = 2.0
MOST_GROWN = 512 << 20
GIVEN_UP_S = 10.0
"""Processor time after which a read is given up."""
ROOM = 4 * MOST_GROWN
"""Address space: more is refused, so that a read cannot exhaust the machine's memory."""
MOST_CELLS = 3
"""Most cells of a scenario that is read from its resolved form, which is slow."""
GOOD = b"""version: 1
name: x
workload: {kind: mlp, ranks: 2, steps: 4, global_batch: 2}
launcher: {kind: sim}
recovery: {strategy: hot-spare}
faults:
  - {id: a, kind: process-kill, at: {step: 2}}
"""
AGAIN = 1
"""How often a read that took too long is measured again; the smallest value counts."""
_COUNTED = re.compile(r"^(\d+) errors?; nothing was started$")
_HEAD = re.compile(r"^.+:\d+:\d+: (.*)$")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\$\{[^}]*\}")


@dataclass(frozen=True, kw_only=True)
class ReadResult:
    """The result of reading a file. ``path``: its path; ``said``: why it was refused, "" if it
    loads; ``crash``, ``place``: of any other exception; ``other``: what differed when it was read
    again; ``warned``: Python's warnings; ``cautions``: the loader's remarks on a file that loads.
    """

    path: str = ""
    said: str = ""
    crash: str = ""
    place: str = ""
    other: str = ""
    warned: str = ""
    cautions: tuple[str, ...] = ()
    cpu_s: float = 0.0
    grown: int = 0

    @property
    def heads(self) -> list[str]:
        """The errors shown, without places, names and numbers."""
        heads = [found[1] for line in self.said.splitlines() if (found := _HEAD.match(line))]
        return [
            plain(_QUOTED.sub("'#'", head))[:60] for head in heads or self.said.splitlines()[:1]
        ]


@dataclass(kw_only=True)
class _Spent:
    """Resources used so far. ``cpu_s``: by the longest part."""

    cpu_s: float = 0.0
    grown: int = 0


@dataclass(frozen=True, kw_only=True)
class ScenarioReader:
    """Reads files as ``chaos validate`` and ``chaos plan`` do. ``root``: directory for temporary
    files.
    """

    catalogue: Catalogue
    root: Path | None = None
    _warm: list[bool] = field(default_factory=list)

    def read(self, data: bytes) -> ReadResult:
        """Read a file. Raises only what interrupts."""
        if not self._warm:
            self._warm.append(True)
            self.read(GOOD)  # the cost of first imports must not count
        found = self._read(data)
        for _ in range(AGAIN):
            if found.crash or found.cpu_s <= MOST_CPU_S:
                break
            gc.collect()
            gc.freeze()  # garbage from before must not count
            try:
                again = self._read(data)
            finally:
                gc.unfreeze()
            found = again if again.cpu_s < found.cpu_s else found
        return found

    def _read(self, data: bytes) -> ReadResult:
        root = Path(tempfile.mkdtemp(prefix="fuzz-", dir=self.root or memory()))
        path, spent = root / "scenario.yaml", _Spent()
        path.write_bytes(data)
        said = crash = place = other = ""
        warned: list[warnings.WarningMessage] = []
        cautions: list[str] = []
        try:
            with _bounded(), warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                warnings.simplefilter("ignore", DeprecationWarning)
                said, other = self._checked(path, spent, cautions)
        except ArmTimeout as error:
            crash, place = str(error), "no end"
        except Exception as error:
            crash, place = traceback_tail(error), place_of(error)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        return ReadResult(
            path=str(path),
            said=said,
            crash=crash,
            place=place,
            other=other,
            warned="; ".join(f"{one.category.__name__}: {one.message}" for one in warned[:1]),
            cautions=tuple(cautions),
            cpu_s=spent.cpu_s,
            grown=spent.grown,
        )

    def _checked(self, path: Path, spent: _Spent, cautions: list[str]) -> tuple[str, str]:
        """Why it is refused, and what differs when it is read again. ``cautions``: receives the
        loader's remarks.
        """
        loaded, said = self._loaded(path, spent)
        if spent.cpu_s > MOST_CPU_S:
            return said, ""  # enough is known
        twice, again = self._loaded(path, spent)
        if (said, loaded and loaded.warnings) != (again, twice and twice.warnings):
            return (
                said,
                f"read twice, it is said to be\n{said or 'good'}\nand to be\n{again or 'good'}",
            )
        if loaded is None:
            return said, ""
        cautions += loaded.warnings
        try:
            _measured(spent, lambda: self._planned(loaded))
        except ScenarioError as error:
            return str(error), ""
        return "", _resolved(path, loaded)

    def _loaded(self, path: Path, spent: _Spent) -> tuple[LoadedScenario | None, str]:
        found: list[LoadedScenario] = []
        try:
            _measured(spent, lambda: found.append(load(path, self.catalogue, env={})))
        except ScenarioError as error:
            return None, str(error) or "nothing"
        return found[0], ""

    def _planned(self, loaded: LoadedScenario) -> None:
        plan = plan_run(loaded, self.catalogue, seed=None, cells=loaded.cells)
        as_text(plan)
        json.dumps(as_json(plan))


def _resolved(path: Path, loaded: LoadedScenario) -> str:
    """What a run directory does not preserve of a scenario."""
    if len(loaded.cells) > MOST_CELLS:
        return ""
    run = RunDirectory(path.parent)
    cells = list(loaded.cells)
    kept = ResolvedRun(
        run_id="r",
        source=str(path),
        started="",
        reproduce="",
        seed=cells[0].scenario.seed,
        cells=cells,
        sla_lines=loaded.sla_lines,
        lines=loaded.lines,
    )
    write_resolved(run, kept)
    return "" if read_resolved(run) == kept else "its resolved form is another scenario"


def find_in(read: ReadResult) -> Find | None:
    """What is wrong with the handling of a file, or None."""
    if read.crash:
        return Find(key=f"crash: {read.place}", text=read.crash)
    if read.other:
        return Find(key=f"not the same twice: {read.other.splitlines()[0]}", text=read.other)
    if read.warned:
        return Find(key=f"a warning of Python's: {read.warned.partition(':')[0]}", text=read.warned)
    if read.cpu_s > MOST_CPU_S:
        text = f"{read.cpu_s:.1f} s of a processor, {MOST_CPU_S:g} s are the most"
        return Find(key=f"too slow: {_first(read)}", text=text)
    if read.grown > MOST_GROWN:
        text = f"{read.grown >> 20} MiB more memory, {MOST_GROWN >> 20} MiB are the most"
        return Find(key=f"too much memory: {_first(read)}", text=text)
    for what, shown in _flaws(read):
        # the folder's name is random
        line = shown.replace(f"{os.path.dirname(read.path)}/", "")
        return Find(
            key=f"{what}: {plain(_QUOTED.sub('#', line))[:80]}", text=f"{what}: {line!r:.1000}"
        )
    return None


def _first(read: ReadResult) -> str:
    return next(iter(read.heads), "it loads")


def _flaws(read: ReadResult) -> Iterator[tuple[str, str]]:
    """What is wrong with the text of a refusal or a caution, and in which line."""
    for one in read.cautions:
        yield from _unreadable(one, MOST_SAID)
    if not read.said:
        return
    lines = read.said.split("\n")
    counted = _COUNTED.match(lines[-1])
    errors = min(int(counted[1]), MOST_TOLD) if counted else 1
    yield from _unreadable(read.said, MOST_SAID * errors)
    folder = os.path.dirname(read.path)
    if folder not in read.said:
        yield "the file is not named", lines[0]
    for line in lines:
        if not (line.startswith((folder, " ", "\t", "... and ")) or _COUNTED.match(line)):
            yield "a line that is none of an error's", line


def _unreadable(text: str, most: int) -> Iterator[tuple[str, str]]:
    lines = text.split("\n")
    if len(text) > most:
        yield f"more than {MOST_SAID} characters for an error", max(lines, key=len)
    for line in lines:
        if any(not char.isprintable() and char != "\t" for char in line):
            yield "characters that are not to be seen", line


# ---- resources


def _measured(spent: _Spent, do: Callable[[], object]) -> None:
    """Do it, and record the resources used; exceptions pass through."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
        before = _status("VmRSS")
    except OSError:  # not possible: only growth beyond the previous peak is known
        before = _status("VmHWM")
    begun_s = time.process_time()
    try:
        do()
    finally:
        spent.cpu_s = max(spent.cpu_s, time.process_time() - begun_s)
        spent.grown = max(spent.grown, _status("VmHWM") - before)


def _status(name: str) -> int:
    """Bytes of memory, from the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def _bounded() -> Iterator[None]:
    """Raise ArmTimeout in this thread, which must be the main one, after GIVEN_UP_S of processor
    time, and MemoryError beyond ROOM.
    """

    def over(signum: int, frame: FrameType | None) -> None:
        raise ArmTimeout(f"it did not end within {GIVEN_UP_S:g} s of a processor")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most = size + ROOM
    most = most if soft == resource.RLIM_INFINITY else min(most, soft)
    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, GIVEN_UP_S)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
