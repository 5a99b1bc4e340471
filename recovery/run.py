"""``python -m trainchaos.recovery.run --ranks 4 --spares 1 train.py [ARGS]``: runs a script with
``recovery.join()`` in its loop.

With ``--nodes`` the ranks run on nodes, each with an agent (``python -m
trainchaos.recovery.nodes.serve``) that connects to this process. The ranks keep training when this
process is killed; started again with ``--adopt`` it takes the job over.

Exit status: 0 the job is done, 1 it failed or recovery gave up, 2 wrong usage or a list of taints
that is malformed, 7 too few places are not tainted, 130 and 143 interrupted.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports, which take most of the time to start
    from trainchaos.recovery.cli.early_interrupt import end_on_sigint

    end_on_sigint()

import argparse
import gc
import os
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from trainchaos.chaos.errors import (
    EXIT_FAIL,
    EXIT_INTERRUPTED,
    EXIT_PASS,
    EXIT_TERMINATED,
    ChaosError,
    NewerVersion,
)
from trainchaos.chaos.events.log import ORCHESTRATOR
from trainchaos.recovery.cli.avoided_places import AvoidedPlaces
from trainchaos.recovery.cli.console import ConsoleListener
from trainchaos.recovery.cli.hosts import FleetScripts, LocalScripts, ScriptHost
from trainchaos.recovery.cli.options import (
    UsageError,
    check,
    parser,
    saves_of,
    strategy_of,
    timing_of,
)
from trainchaos.recovery.cli.script_job import JobSpec, ScriptJob
from trainchaos.recovery.cli.takeover_log import lock, read_takeover_log
from trainchaos.recovery.health.checks import Checker, PlaceChecks, check_command
from trainchaos.recovery.health.reputation import Care
from trainchaos.recovery.health.service import machine_service
from trainchaos.recovery.health.taints import TaintError, TaintList, TooFewPlaces, taints_now
from trainchaos.recovery.nodes.coordinator.fleet import Fleet
from trainchaos.recovery.nodes.coordinator.loss import FleetLimits
from trainchaos.recovery.nodes.serve import read_token
from trainchaos.recovery.policy.jobconfig import Exchange, exchange_of
from trainchaos.recovery.policy.strategy import Strategy
from trainchaos.recovery.process.local import prepare_store
from trainchaos.recovery.process.output import say, shield
from trainchaos.recovery.supervise.supervision import StopFlag, Timing

_GPUS = Path("/proc/driver/nvidia/gpus")
_DEVICES = Path("/dev")


COLLECTED = (50_000, 20, 50)
"""Thresholds of Python's collector (700, 10, 10 by default) for a coordinator: it holds objects by
the number of ranks, makes none in cycles, and answers nobody while all of them are searched.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job and return the exit status."""
    usage = parser(__doc__)
    given = usage.parse_args(argv)
    try:
        strategy = strategy_of(given.strategy, given.spares, given.param)
        check(given, strategy)
        return _supervise(given, strategy, timing_of(given))
    except UsageError as error:
        usage.error(str(error))
    except (TaintError, NewerVersion, TooFewPlaces) as error:
        say(str(error))
        return error.exit_code
    except ChaosError as error:
        say(str(error))
        return EXIT_FAIL


def _folders(given: argparse.Namespace) -> Path:
    """Create the run's directories; returns the one for event logs."""
    named = f"recovery-{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}-{os.getpid()}"
    events: Path = (given.events or Path("runs") / named).resolve()
    folder = events
    try:
        for folder in (events, given.logs):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make {folder}: {error.strerror}; choose --events and --logs"
        ) from error
    if any(events.glob("*.jsonl")) and not given.adopt:
        raise UsageError(f"{events} holds the events of another job: choose a new directory")
    return events


def _spec(given: argparse.Namespace, events: Path, exchange: Exchange) -> JobSpec:
    return JobSpec(
        script=given.script.resolve(),
        args=tuple(given.args),
        ranks=given.ranks,
        shards=given.shards,
        mesh=given.mesh,
        events=events,
        exchange=exchange,
        checkpoint_dir=given.checkpoint_dir,
        checkpoint_every=given.every,
        checkpoint_keep=given.keep,
        saves=saves_of(given.saves),
        verify_every=given.verify_every,
        log_limit_bytes=int(given.log_limit * 1e9),
        logs=given.logs.resolve() if given.logs else None,
        memory_every=given.memory_checkpoints or 0,
        memory_bytes=int(given.memory_limit * 1e6),
        fresh=given.fresh,
    )


def _here(
    given: argparse.Namespace, events: Path, wanted: int, avoided: AvoidedPlaces
) -> tuple[ScriptHost, Exchange]:
    places, exchange = _places(given.device, given.backend, wanted)
    places = avoided.left_here(places, wanted)
    health = machine_service(places, reports=given.health_reports)
    logs = given.logs.resolve() if given.logs else None
    return LocalScripts(places, events, logs, health), exchange


def _care(given: argparse.Namespace, host: ScriptHost) -> Care:
    checker: Checker | None = None
    if given.preflight_rejoins and isinstance(host, FleetScripts):
        checker = host.checks
    elif given.preflight_rejoins:
        checker = PlaceChecks(check_command())
    return Care(checker=checker, taints=TaintList(given.taints) if given.taint_alarms else None)


def _on_nodes(
    given: argparse.Namespace, events: Path, wanted: int, epoch: int, avoided: AvoidedPlaces
) -> tuple[ScriptHost, Exchange]:
    prepare_store()  # agents that have connected would get no answer meanwhile
    gc.set_threshold(*COLLECTED)
    host, port = given.listen
    limits = FleetLimits.of(given.nodes, node_s=given.node_timeout)
    fleet = Fleet(
        token=read_token(given.token_file), host=host, port=port, epoch=epoch, limits=limits
    )
    nodes = FleetScripts(
        fleet,
        nodes=given.nodes,
        size=wanted,
        device=given.device,
        events=events,
        avoided=avoided,
    )
    on_gpus = given.device == "cuda"
    return nodes, exchange_of(given.backend, own_gpus=True) if on_gpus else Exchange("gloo")


def _places(
    device: str, backend: Literal["auto", "gloo", "nccl"], wanted: int
) -> tuple[tuple[str, ...], Exchange]:
    """Devices to assign, and the exchange: by default NCCL where every process, spares included,
    gets its own GPU. Raises UsageError where NCCL or CUDA was asked for and there is no GPU.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    count = listed or len([path for path in _DEVICES.glob("nvidia[0-9]*") if path.is_char_device()])
    if visible is not None:
        count = min(count, len([word for word in visible.split(",") if word.strip()]))
    for option, value in (("device", device), ("backend", backend)):
        if value in ("cuda", "nccl") and not count:
            raise UsageError(f"--{option} {value}: this machine shows no NVIDIA GPU")
    if device == "cpu" or not count:
        return ("cpu",), Exchange("gloo")
    places = tuple(f"cuda:{index}" for index in range(count))
    return places, exchange_of(backend, own_gpus=count >= wanted)


def _supervise(given: argparse.Namespace, strategy: Strategy, timing: Timing) -> int:
    stop = StopFlag()

    def interrupt(signum: int, _: object) -> None:
        stop.signum = signum

    # Installed before anything is started, so that an early Ctrl-C ends every process.
    old = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _run(given, strategy, timing, stop)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _run(given: argparse.Namespace, strategy: Strategy, timing: Timing, stop: StopFlag) -> int:
    avoided = AvoidedPlaces(taints_now(given.taints))  # before anything is made
    events = _folders(given)
    held = lock(events)
    try:
        takeover = (
            read_takeover_log(events)
            if given.adopt and (events / f"{ORCHESTRATOR}.jsonl").exists()
            else None
        )
        if isinstance(takeover, str):
            say(f"the job in {events} is over: {takeover}")
            return EXIT_PASS if takeover == "completed" else EXIT_FAIL
        wanted = given.ranks + strategy.spares_wanted
        if given.nodes is None:
            host, exchange = _here(given, events, wanted, avoided)
        else:
            epoch = takeover.epoch if takeover else 1
            host, exchange = _on_nodes(given, events, wanted, epoch, avoided)
        spec = _spec(given, events, exchange)
        shown = ConsoleListener(takeover)
        job = ScriptJob(
            spec,
            strategy,
            timing,
            host=host,
            listener=shown,
            stop=stop,
            takeover=takeover,
            avoided=avoided,
            care=_care(given, host),
        )
        outcome = job.run()
    finally:
        os.close(held)
    for failure in job.late_failures:
        say(f"after the last step {failure}")
    say(f"events in {spec.events}")
    if outcome == "interrupted":
        return EXIT_TERMINATED if stop.signum == signal.SIGTERM else EXIT_INTERRUPTED
    return EXIT_PASS if outcome == "completed" and not job.late_failures else EXIT_FAIL


if __name__ == "__main__":
    shield()
    sys.exit(main())
