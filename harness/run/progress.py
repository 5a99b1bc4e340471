"""Shows a run to a person as it happens: one live block in a terminal, plain lines without one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

from trainchaos.chaos.columns import NO_BREAK, fold
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.planning.load import used
from trainchaos.chaos.scenario.model import Cell
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.recovery.checkpoint.memory import ROLE as KEEPER

_LINES_EVERY_S = 5.0
_WIDE = 100  # columns from which a bar is long
_KEPT_FREE = 6  # lines of a terminal above the bars
_HANG = " " * 6
_LARGE_BYTES = 16 << 20  # of logs, from which judging takes longer than a moment


_AGAIN = MappingProxyType(
    {
        "restart": "the command's ranks were started again",
        "resumed": "steps are reported again",
        "shrunk": "the others go on",
        "rollback": "it went back by itself",
    }
)
"""Why a command's generation began."""


class SilentWatcher:
    """Shows nothing."""

    def on_event(self, setup: ArmSetup, event: Event) -> None:
        """Nothing."""

    def on_waiting(self, setup: ArmSetup, known: str) -> None:
        """Nothing."""

    def on_progress(self, setup: ArmSetup, committed: int, now_ns: int) -> None:
        """Nothing."""


def describe(event: Event) -> str | None:
    """One line about an event for a person watching, or None."""
    data = event.data
    match event.kind:
        case Kind.MACHINE_BUSY:
            of = used(data["others"], data["cpus"])
            return f"? other programs used {of} meanwhile: these are times of a busy machine"
        case Kind.FAULT_INJECTED:
            target = data["target"]
            who = _whom(target)
            at = f" in step {event.step}" if event.step else ""
            steps = data.get("late_steps")
            late = f", {steps} steps late: {data['late']}" if steps else ""
            return f"✗ {data['kind']} hits {who}{at}{late}"
        case Kind.FAULT_FAILED:
            return f"? {data['fault']} did not land: {data['reason']}"
        case Kind.FAILURE_DETECTED:
            who = f"rank {data['rank']}" if data["rank"] is not None else "no rank"
            return f"! detected: {data['cause']}, {who} blamed ({data['detail']})"
        case Kind.DECISION:
            return f"↻ {data['reason']}"
        case Kind.GENERATION_READY if event.generation > 1:
            origin = f" from {data['checkpoint']}" if data["checkpoint"] else ""
            ranks, step = len(data["members"]), data["resume_step"]
            return f"↻ generation {event.generation}: {ranks} ranks go on after step {step}{origin}"
        case Kind.GENERATION_STARTED if event.generation > 1 and data["state"] == "own":
            count = len(data["members"])
            return f"↻ {_AGAIN[data['cause']]}: {count} rank{'s' if count != 1 else ''}"
        case Kind.PROCESS_EXITED if data.get("role") == KEEPER and not data["expected"]:
            return f"! {data['process']} ended, and what it kept in memory is gone: {_end(data)}"
        case Kind.NODE_LOST:
            return f"! node {data['node']} is lost: {data['why']}"
        case Kind.NODE_JOINED if event.generation > 0:
            return f"↻ node {data['node']} is there ({data['host']})"
        case Kind.PLACE_CHECKED:
            found = {True: "fit", False: "unfit"}.get(data["fit"], "not known to be fit")
            what = f": {data['said']}" if data["said"] else ""
            return f"↻ {data['device']} of node {data['node']} is {found}{what}"
        case Kind.PLACE_TAINTED:
            return f"! {data['place']} is tainted, by {data['by']}"
        case Kind.RUN_FINISHED if data["outcome"] != "completed":
            return f"✗ {data['outcome']}: {data['reason']}"
    return None


def _end(exited: Mapping[str, Any]) -> str:
    signal = exited["signal"]
    return f"exit code {exited['exit_code']}" if signal is None else f"signal {signal}"


def _whom(target: Mapping[str, Any]) -> str:
    if "process" not in target:
        return (
            ", ".join(_named(what, which) for what, which in target.items() if what != "processes")
            or "the job"
        )
    rank, process = target.get("rank"), str(target["process"])
    if rank is None:
        return process if process.startswith("launcher") else f"spare {process}"
    return f"rank {rank} ({process})"


def _named(what: str, which: Any) -> str:
    """``links 0→1, 0→2``, ``node 1``, ``the job's store``."""
    if what == "links":
        pairs = [f"{source}→{other}" for source, other in which]
        return f"link{'s' if len(pairs) > 1 else ''} {', '.join(pairs)}"
    if isinstance(which, list | tuple):
        return f"{what} {', '.join(map(str, which))}"
    return f"{which} {what}" if which == "the job's" else f"{what} {which}"


def tell_judging(run: RunDirectory) -> None:
    """A line on standard error before logs are judged that take a while."""
    size = sum(path.stat().st_size for path in (run.root / "events").rglob("*.jsonl"))
    if size > _LARGE_BYTES:
        with suppress(OSError):
            print(f"judging {size >> 20} MiB of logs ...", file=sys.stderr, flush=True)


@contextmanager
def progress(name: str, cells: Sequence[Cell]) -> Iterator[Any]:
    """A watcher that writes to standard error: live in a terminal, lines elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    total = sum(
        cell.scenario.repeat * (2 if cell.scenario.baseline == "paired" else 1) for cell in cells
    )
    spec = cells[0].scenario.workload
    what = spec.title
    ranks = "rank" if spec.ranks == 1 else "ranks"
    arms = "arm" if total == 1 else "arms"
    console.print(
        f"[bold]{name}[/bold] · {what}, {spec.ranks} {ranks}, {spec.steps} steps · {total} {arms}"
    )
    if console.is_terminal:
        with _Live(console, total) as watcher:
            yield watcher
    else:
        yield _Lines(total)


class _Lines:
    """One line for each thing that happens, with the arm's own clock."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._number = 0
        self._started_ns = 0
        self._shown_ns = 0
        self._known = ""

    def on_event(self, setup: ArmSetup, event: Event) -> None:
        """A line if the event is worth one."""
        if event.kind is Kind.RUN_STARTED:
            self._number += 1
            self._known = ""
            self._started_ns = self._shown_ns = event.time_ns
            self._say(event.time_ns, f"[{self._number}/{self._total}] {setup.id}")
        text = describe(event)
        if event.kind is Kind.RUN_FINISHED and text is None:
            text = f"✓ {event.data['committed_step']} steps"
        if text:
            self._say(event.time_ns, f"    {text}")

    def on_waiting(self, setup: ArmSetup, known: str) -> None:
        self._known = known

    def on_progress(self, setup: ArmSetup, committed: int, now_ns: int) -> None:
        if now_ns - self._shown_ns > _LINES_EVERY_S * 1e9:
            self._shown_ns = now_ns
            done = f"step {committed}/{setup.cell.scenario.workload.steps}"
            self._say(now_ns, f"    {self._known or done}")

    def _say(self, now_ns: int, text: str) -> None:
        # The reader may close the pipe (``| head``); the run goes on.
        with suppress(OSError):
            print(f"{(now_ns - self._started_ns) / 1e9:8.2f}s {text}", file=sys.stderr, flush=True)


class _Live:
    """A bar for each arm; what happens stays above it, with the arm and its own clock."""

    def __init__(self, console: Any, total: int) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._console = console
        self._total = total
        self._number = 0
        self._started_ns = 0
        self._since = (0, 0)
        self._known = ""
        narrow = console.width < _WIDE
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=10 if narrow else 28),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: list[Any] = []

    def __enter__(self) -> _Live:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)

    def on_event(self, setup: ArmSetup, event: Event) -> None:
        """A new bar for a new arm; a line for what happens in it."""
        if event.kind is Kind.RUN_STARTED:
            self._number += 1
            self._known = ""
            self._started_ns = event.time_ns
            self._since = (0, event.time_ns)
            label = f"{self._number:>2}/{self._total} {self._short(setup.id)}"
            self._tasks.append(
                self._progress.add_task(
                    label, total=setup.cell.scenario.workload.steps, rate="starting"
                )
            )
            # what is below the last line of the terminal is not shown, and the newest is lowest
            for old in self._tasks[: -max(1, self._console.height - _KEPT_FREE)]:
                self._progress.update(old, visible=False)
        text = describe(event)
        if text:
            self._say(setup, event.time_ns, text)
        if event.kind is Kind.RUN_FINISHED and self._tasks:
            task = self._tasks[-1]
            self._progress.update(task, completed=event.data["committed_step"], rate="")
            self._progress.stop_task(task)

    def _say(self, setup: ArmSetup, time_ns: int, text: str) -> None:
        """One event, folded so that its time and its text stay in columns of their own."""
        style = {"✗": "red", "!": "yellow", "?": "yellow"}.get(text[0], "cyan")
        seconds = (time_ns - self._started_ns) / 1e9
        head = f"{seconds:8.2f}s [{self._number}/{self._total}] {setup.id}"
        # the mark stays at its text, which a no-break space says
        lines = fold(f"{head}  {text.replace(' ', NO_BREAK, 1)}", self._console.width, _HANG)
        self._console.print("\n".join(lines), style=style, markup=False, soft_wrap=True)

    def _short(self, arm: str) -> str:
        """The name of an arm beside its bar: its end, which tells arms of a cell apart, stays."""
        room = max(12, self._console.width - (44 if self._console.width < _WIDE else 66))
        return arm if len(arm) <= room else f"…{arm[1 - room :]}"

    def on_waiting(self, setup: ArmSetup, known: str) -> None:
        """Behind the bar, where there is no rate yet."""
        if self._tasks and known != self._known:
            self._known = known
            self._progress.update(self._tasks[-1], rate=known or "waiting")

    def on_progress(self, setup: ArmSetup, committed: int, now_ns: int) -> None:
        """Move the bar; throughput over the last second."""
        if self._known or not self._tasks:
            return
        task = self._tasks[-1]
        step, since_ns = self._since
        if now_ns - since_ns > 1e9:
            rate = (committed - step) / ((now_ns - since_ns) / 1e9)
            self._since = (committed, now_ns)
            self._progress.update(task, rate=f"{rate:.1f} steps/s" if rate > 0 else "waiting")
        self._progress.update(task, completed=committed)
