"""Requirements on the loader for any file, however spoilt: it loads and can be planned, or is
refused with a clear, short text.

- Only ScenarioError is raised, and Python prints no warning. The text names the file, contains no
  terminal control characters and only lines that belong to an error, and has at most ``MOST_SAID``
  characters per error, of which at most fifty are shown.
- Loading takes at most ``MOST_CPU_S`` of processor time (not wall time: machines are busy),
  planning as much, and all of it ``MOST_GROWN`` bytes of memory.
- The same file gives the same result twice.
- A scenario that loads is the same when it is read again from its resolved form.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading.load import LoadedScenario, load
from trainchaos.chaos.planning.planview import as_json, as_text, plan_run
from trainchaos.chaos.scenario.catalogue import Catalogue
from trainchaos.chaos.scenario.model import ResolvedRun
from trainchaos.harness.fuzz.play.play import ArmTimeout, bounded, traceback_tail
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
_COUNTED = re.compile(r"^(\d+) errors?; nothing was started$")


@dataclass(kw_only=True)
class Reading:
    """What became of a file. ``said``: why it was refused, "" if it loads; ``flaw``: what is wrong
    with how it was handled, "" if nothing; ``cpu_s``: processor seconds of
    the longest part; ``grown``: bytes of memory.
    """

    said: str = ""
    flaw: str = ""
    cpu_s: float = 0.0
    grown: int = 0
    cautions: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Reads files as ``chaos validate`` and ``chaos plan`` do, in ``folder``."""

    catalogue: Catalogue
    folder: Path

    def read(self, data: bytes) -> Reading:
        """Read a file. One that took too long is measured again: the smaller value counts."""
        made = self._read(data)
        if made.flaw.startswith("too slow"):
            gc.collect()  # garbage from before must not count
            again = self._read(data)
            made = again if again.cpu_s < made.cpu_s else made
        return made

    def _read(self, data: bytes) -> Reading:
        path, made = self.folder / "scenario.yaml", Reading()
        path.write_bytes(data)
        try:
            with _limited(), warnings.catch_warnings(record=True) as warned, _grown(made):
                warnings.simplefilter("always")
                warnings.simplefilter("ignore", DeprecationWarning)
                made.flaw = self._handled(path, made)
        except ArmTimeout as error:
            made.flaw = f"too slow: {error}"
        except Exception as error:
            made.flaw = f"crash: {traceback_tail(error)}"
        if not made.flaw and warned:
            made.flaw = f"a warning of Python's: {warned[0].message}"
        if not made.flaw and made.cpu_s > MOST_CPU_S:
            made.flaw = f"too slow: {made.cpu_s:.1f} s of a processor"
        if not made.flaw and made.grown > MOST_GROWN:
            made.flaw = f"too much memory: {made.grown >> 20} MiB"
        made.flaw = made.flaw or next(flaws_of(made.said, made.cautions, str(self.folder)), "")
        return made

    def _handled(self, path: Path, made: Reading) -> str:
        """Load it twice, plan it, and read it from its resolved form; what differs, "" if nothing
        does.
        """
        loaded, made.said = self._loaded(path, made)
        if made.cpu_s > MOST_CPU_S:
            return ""  # enough is known
        twice, said = self._loaded(path, made)
        if (made.said, loaded and loaded.warnings) != (said, twice and twice.warnings):
            return f"not the same twice: {made.said or 'good'}\nand then {said or 'good'}"
        if loaded is None:
            return ""
        made.cautions += loaded.warnings
        try:
            with _timed(made):
                plan = plan_run(loaded, self.catalogue, seed=None, cells=loaded.cells)
                assert as_text(plan) and json.dumps(as_json(plan))
        except ScenarioError as error:
            made.said = str(error)
            return ""
        return _resolved_otherwise(path, loaded)

    def _loaded(self, path: Path, made: Reading) -> tuple[LoadedScenario | None, str]:
        try:
            with _timed(made):
                return load(path, self.catalogue, env={}), ""
        except ScenarioError as error:
            return None, str(error) or "nothing"


def _resolved_otherwise(path: Path, loaded: LoadedScenario) -> str:
    """What a run directory does not preserve of a scenario."""
    if len(loaded.cells) > MOST_CELLS:
        return ""
    run, cells = RunDirectory(path.parent), list(loaded.cells)
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


def flaws_of(said: str, cautions: list[str], folder: str) -> Iterator[str]:
    """What is wrong with the text of a refusal or a caution, and in which line."""
    for caution in cautions:
        yield from _unreadable(caution, MOST_SAID)
    if not said:
        return
    lines = said.split("\n")
    counted = _COUNTED.match(lines[-1])
    yield from _unreadable(said, MOST_SAID * (min(int(counted[1]), MOST_TOLD) if counted else 1))
    if folder not in said:
        yield f"the file is not named: {lines[0]}"
    for line in lines:
        if not (line.startswith((folder, " ", "\t", "... and ")) or _COUNTED.match(line)):
            yield f"a line that is none of an error's: {line}"


def _unreadable(text: str, most: int) -> Iterator[str]:
    if len(text) > most:
        yield f"more than {MOST_SAID} characters for an error: {max(text.splitlines(), key=len)}"
    for line in text.split("\n"):
        if any(not char.isprintable() and char != "\t" for char in line):
            yield f"characters that are not to be seen: {line!r}"


@contextmanager
def _timed(made: Reading) -> Iterator[None]:
    """Note the processor time used inside."""
    begun_s = time.process_time()
    try:
        yield
    finally:
        made.cpu_s = max(made.cpu_s, time.process_time() - begun_s)


@contextmanager
def _grown(made: Reading) -> Iterator[None]:
    """Note the memory used inside."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present memory
        before = _status("VmRSS")
    except OSError:  # not possible: only growth beyond the previous peak is known
        before = _status("VmHWM")
    try:
        yield
    finally:
        made.grown = _status("VmHWM") - before


def _status(name: str) -> int:
    """Bytes of memory, from the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def _limited() -> Iterator[None]:
    """ArmTimeout after GIVEN_UP_S of processor time, and MemoryError beyond ROOM."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    most = size + ROOM if soft == resource.RLIM_INFINITY else min(size + ROOM, soft)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        with bounded(GIVEN_UP_S, "read"):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
