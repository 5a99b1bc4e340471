"""``python -m recovery.run --ranks 4 --spares 1 train.py [ARGS]``: runs a script with ``recovery.join()`` in its loop.

Exit status: 0 the job is done, 1 it failed or recovery gave up, 2 wrong usage, 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from chaos.errors import EXIT_FAIL, EXIT_INTERRUPTED, EXIT_PASS, EXIT_TERMINATED, ChaosError
from chaos.events import Event, Kind
from recovery import strategies
from recovery.interval import parse
from recovery.jobconfig import Saves
from recovery.strategy import Cause, Strategy
from recovery.supervision import Timing
from recovery.supervisor import JobSpec, StopFlag, Supervisor

_GPUS = Path("/proc/driver/nvidia/gpus")


def main(argv: Sequence[str] | None = None) -> int:
    """Run it and return the exit status."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        strategy = _strategy(given.strategy, given.spares, given.param)
        spec = _spec(given, strategy)
        timing = Timing(start_timeout_s=given.start_timeout, end_timeout_s=given.end_timeout)
        return _supervise(spec, strategy, timing)
    except _UsageError as error:
        parser.error(str(error))
    except ChaosError as error:
        _say(str(error))
        return EXIT_FAIL


class _UsageError(Exception):
    """The command line asks for something that cannot be."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recovery.run", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=_positive, default=2, help="processes that train (default 2)")
    add(
        "--shards",
        type=_positive,
        default=1,
        metavar="N",
        help="ranks that hold one copy of the model together (default 1: each holds all of it)",
    )
    add("--spares", type=int, help="processes held ready, for hot-spare (default 1)")
    add("--strategy", default="hot-spare", help=f"one of {', '.join(strategies.names())} (default hot-spare)")
    add("--param", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the strategy")
    _add_state_options(add)
    add(
        "--events",
        type=Path,
        metavar="DIR",
        help="a new directory for the event logs (default runs/recovery-<time>)",
    )
    add(
        "--logs",
        type=Path,
        metavar="DIR",
        help="write what ranks print to DIR/<process>.log, not to the terminal",
    )
    add(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="what ranks train on (default auto)"
    )
    add(
        "--start-timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds until a process has to be ready",
    )
    add(
        "--end-timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds the script may take after its last step",
    )
    add("script", type=Path)
    add("args", nargs=argparse.REMAINDER, help="passed to the script")
    return parser


def _add_state_options(add: Callable[..., object]) -> None:
    """Of checkpoints, and of the comparison of replicas."""
    add("--checkpoint-dir", type=Path, metavar="DIR", help="instead of what the script says")
    add(
        "--every",
        type=_interval,
        metavar="STEPS",
        help="steps between checkpoints, or 30s, or auto; see --saves",
    )
    add(
        "--verify-every",
        type=_count,
        metavar="STEPS",
        help="steps after which replicas compare digests of their state, 0 for never (default: with each checkpoint)",
    )
    add(
        "--saves",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="mode=async, sharded=true, delta=K, mtbf_s=SECONDS: how checkpoints are written",
    )
    add(
        "--memory-checkpoints",
        type=_positive,
        metavar="STEPS",
        help="keep a checkpoint in memory besides, every so many steps: it survives ranks, not this machine",
    )
    add("--memory-limit", type=float, default=4000.0, metavar="MB", help="memory for them (default 4000)")
    add("--keep", type=_positive, metavar="N", help="checkpoints kept, instead of what the script says")


def _interval(text: str) -> int | str:
    every = int(text) if text.lstrip("-").isdigit() else text
    try:
        parse(every)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return every


def _saves(said: Sequence[str]) -> Saves | None:
    try:
        return Saves.model_validate(dict(word.partition("=")[::2] for word in said)) if said else None
    except ValidationError as error:
        first = error.errors()[0]
        raise _UsageError(
            f"--saves {'.'.join(map(str, first['loc']))}: {first['msg']}; there are mode, sharded, delta and mtbf_s"
        ) from error


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _strategy(name: str, spares: int | None, params: Sequence[str]) -> Strategy:
    try:
        kind = strategies.find(name)
    except KeyError:
        raise _UsageError(f"no strategy {name!r}; there are {', '.join(strategies.names())}") from None
    values = dict(param.partition("=")[::2] for param in params)
    if spares is not None and "spares" in kind.model_fields:
        values["spares"] = str(spares)
    elif spares:
        raise _UsageError(f"{name} keeps no spares: leave --spares out, or use --strategy hot-spare")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(kind.model_fields) or "none"
        where = ".".join(map(str, first["loc"]))
        raise _UsageError(f"{name}: {where}: {first['msg']} (its parameters: {known})") from None


def _spec(given: argparse.Namespace, strategy: Strategy) -> JobSpec:
    if not given.script.is_file():
        raise _UsageError(f"no script {given.script}")
    events = given.events or Path("runs") / f"recovery-{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-{os.getpid()}"
    try:
        for folder in (events, given.logs):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _UsageError(f"cannot make {folder}: {error.strerror}; choose --events and --logs") from error
    if any(events.glob("*.jsonl")):
        raise _UsageError(f"{events} holds the events of another job: choose a new directory")
    if given.ranks % given.shards:
        raise _UsageError(
            f"{given.ranks} ranks do not make copies of {given.shards} shards: use a multiple of {given.shards}"
        )
    if given.memory_limit * 1e6 < 1:
        raise _UsageError(
            f"--memory-limit {given.memory_limit:g} holds nothing: three times the state, or more"
        )
    places, backend = _places(given.device, given.ranks + strategy.spares_wanted)
    return JobSpec(
        script=given.script, args=tuple(given.args), ranks=given.ranks, shards=given.shards, events=events.resolve(),
        logs=given.logs.resolve() if given.logs else None, places=places, backend=backend,
        checkpoint_dir=given.checkpoint_dir, checkpoint_every=given.every, checkpoint_keep=given.keep,
        saves=_saves(given.saves), verify_every=given.verify_every,
        memory_every=given.memory_checkpoints or 0, memory_bytes=int(given.memory_limit * 1e6),
    )  # fmt: skip


def _places(device: str, wanted: int) -> tuple[tuple[str, ...], Literal["gloo", "nccl"]]:
    """Devices to deal out, and the backend: NCCL where every process, spares too, gets a GPU of its own."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    if visible is not None:
        count = min(count, len([word for word in visible.split(",") if word.strip()]))
    if device == "cuda" and not count:
        raise _UsageError("--device cuda: this machine shows no NVIDIA GPU")
    if device == "cpu" or not count:
        return ("cpu",), "gloo"
    return tuple(f"cuda:{index}" for index in range(count)), "nccl" if count >= wanted else "gloo"


def _supervise(spec: JobSpec, strategy: Strategy, timing: Timing) -> int:
    stop = StopFlag()

    def interrupt(signum: int, _: object) -> None:
        stop.signum = signum

    # Before anything is started: an early Ctrl-C must end what has been.
    old = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        supervisor = Supervisor(spec, strategy, timing, listener=_Shown(), stop=stop)
        outcome = supervisor.run()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    for failure in supervisor.late_failures:
        _say(f"after the last step {failure}")
    _say(f"events in {spec.events}")
    if outcome == "interrupted":
        return EXIT_TERMINATED if stop.signum == signal.SIGTERM else EXIT_INTERRUPTED
    return EXIT_PASS if outcome == "completed" and not supervisor.late_failures else EXIT_FAIL


class _Shown:
    """A line on standard error for whatever a person wants to know."""

    def __init__(self) -> None:
        self._pids: dict[str, int] = {}
        self._steps = 0

    def on_event(self, event: Event) -> None:
        """A line, if the event is worth one."""
        if event.kind is Kind.PROCESS_SPAWNED:
            self._pids[event.data["process"]] = event.data["pid"]
        text = _describe(event)
        if event.kind is Kind.RUN_STARTED:
            self._steps = event.data["steps"]
        if event.kind is Kind.GENERATION_READY and event.data["resume_step"] >= self._steps:
            text += f": of {self._steps} none is left"
        elif event.kind is Kind.GENERATION_READY:
            text += f"; pids {' '.join(str(self._pids[name]) for name in event.data['members'])}"
        if text:
            _say(text)

    def on_recovered(self, seconds: float, step: int) -> None:
        """How long it took."""
        _say(f"recovered: step {step} committed {seconds:.2f} s after the failure was detected")

    def on_failed_save(self, checkpoint: str, error: str) -> None:
        """What the disk said."""
        _say(f"checkpoint {checkpoint} could not be saved, training goes on: {error}")


def _describe(event: Event) -> str:
    """What an event means for a person, empty when nothing."""
    data = event.data
    match event.kind:
        case Kind.RUN_STARTED:
            spares = f" + {data['spares']} spare" if data["spares"] else ""
            return f"{data['cell']}: {data['steps']} steps, {data['ranks']} ranks{spares}, {data['strategy']}"
        case Kind.GENERATION_READY:
            origin = f", restored from {data['checkpoint']}" if data["checkpoint"] else ""
            ranks, step = len(data["members"]), data["resume_step"]
            return f"generation {event.generation}: {ranks} ranks train after step {step}{origin}"
        case Kind.FAILURE_DETECTED:
            who = data["process"] or "no rank"
            who = who if data["rank"] is None else f"rank {data['rank']} ({who})"
            word = "notice" if data["cause"] == Cause.NOTICE else "failure"
            return f"{word}: {who}, {data['cause']}: {data['detail']}"
        case Kind.DECISION:
            return f"decision: {data['reason']}"
        case Kind.PROCESS_EXITED if not data["expected"]:
            code, number = data["exit_code"], data["signal"]
            return f"{data['process']} ended: {f'exit code {code}' if number is None else f'signal {number}'}"
        case Kind.LEFTOVERS if data["processes"]:
            return f"left behind: {data['processes']}"
        case Kind.RUN_FINISHED:
            return f"{data['outcome']}: {data['reason']}"
    return ""


def _say(text: str) -> None:
    with suppress(OSError):  # whoever reads along may go away
        print(f"recovery: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
