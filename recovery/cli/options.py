"""The command line of ``recovery.run``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainchaos.chaos.errors import ScenarioError
from trainchaos.recovery.nodes.coordinator.loss import FleetLimits
from trainchaos.recovery.nodes.link import beat_rate
from trainchaos.recovery.nodes.serve import address_of
from trainchaos.recovery.policy import strategies
from trainchaos.recovery.policy.interval import parse
from trainchaos.recovery.policy.jobconfig import Saves
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.policy.strategy import Strategy
from trainchaos.recovery.supervise.supervision import Timing, check_limits


def count(text: str) -> int:
    """A whole number, 0 or more. Raises ValueError, ArgumentTypeError."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def seconds(text: str) -> float:
    """A time to wait, more than 0 seconds. Raises ValueError, ArgumentTypeError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time to wait: use seconds, more than 0")
    return value


def room(text: str) -> float:
    """A size limit, more than 0. Raises ValueError, ArgumentTypeError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text} is no room for anything: use a number, more than 0"
        )
    return value


def positive(text: str) -> int:
    """A whole number, 1 or more. Raises ValueError, ArgumentTypeError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def listen(text: str) -> tuple[str, int]:
    """An address HOST:PORT. Raises ArgumentTypeError."""
    try:
        return address_of(text)
    except ScenarioError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def interval(text: str) -> int | str:
    """Between checkpoints: steps, a time or ``auto``. Raises ArgumentTypeError."""
    every = int(text) if text.lstrip("-").isdigit() else text
    try:
        parse(every)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return every


class UsageError(Exception):
    """The command line asks for something impossible."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The parser of all options, and of the script with its arguments."""
    made = argparse.ArgumentParser(
        prog="python -m trainchaos.recovery.run", description=description
    )
    for name, settings, text in OPTIONS:
        made.add_argument(name, help=text or None, **settings)
    return made


def timing_of(given: argparse.Namespace) -> Timing:
    """The time limits. Raises UsageError for limits in the wrong order."""
    timing = Timing(start_timeout_s=given.start_timeout, end_timeout_s=given.end_timeout)
    timing = timing.with_limits(
        hang_s=given.hang_timeout, park_s=given.park_timeout, join_s=given.join_timeout
    )
    if given.nodes is not None:
        late_s = beat_rate.late_s(beat_rate.beat_s(given.nodes))
        timing = replace(timing, hang=replace(timing.hang, late_s=late_s))
    try:
        check_limits(timing)
    except ScenarioError as error:
        raise UsageError(f"{error.message}; {error.hint}") from error
    return timing


def mesh_of(said: str) -> Mesh:
    """A mesh from NAME=N,NAME=N. Raises argparse.ArgumentTypeError."""
    words = [word.strip().partition("=")[::2] for word in said.split(",")]
    if len(dict(words)) < len(words):
        raise argparse.ArgumentTypeError(f"{said} gives a dimension twice")
    try:
        return Mesh.model_validate(dict(words))
    except ValidationError as error:
        first = error.errors()[0]
        raise argparse.ArgumentTypeError(
            f"{'.'.join(map(str, first['loc']))}: {first['msg']}; there are shard, pipeline,"
            " context and tensor"
        ) from error


def saves_of(said: Sequence[str]) -> Saves | None:
    """How checkpoints are written, from NAME=VALUE; None: the user gave none. Raises UsageError."""
    try:
        return (
            Saves.model_validate(dict(word.partition("=")[::2] for word in said)) if said else None
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"--saves {'.'.join(map(str, first['loc']))}: {first['msg']}; there are mode, sharded,"
            " delta and mtbf_s"
        ) from error


def strategy_of(name: str, spares: int | None, params: Sequence[str]) -> Strategy:
    """The strategy by its name, with its parameters from NAME=VALUE. Raises UsageError."""
    try:
        kind = strategies.find(name)
    except KeyError:
        raise UsageError(
            f"no strategy {name!r}; there are {', '.join(strategies.names())}"
        ) from None
    values = dict(param.partition("=")[::2] for param in params)
    if spares is not None and "spares" in kind.model_fields:
        values["spares"] = str(spares)
    elif spares:
        raise UsageError(
            f"{name} keeps no spares: leave --spares out, or use --strategy hot-spare or adaptive"
        )
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(kind.model_fields) or "none"
        where = ".".join(map(str, first["loc"]))
        raise UsageError(f"{name}: {where}: {first['msg']} (its parameters: {known})") from None


def check(given: argparse.Namespace, strategy: Strategy) -> None:
    """Check options against each other, before anything is created. Raises UsageError."""
    if not given.script.is_file():
        raise UsageError(f"no script {given.script}")
    if given.mesh is not None:
        if given.shards not in (1, given.mesh.cells):
            raise UsageError("--mesh says how many shards there are: leave --shards out")
        given.shards = given.mesh.cells
        if given.ranks % given.shards:
            raise UsageError(
                f"{given.ranks} ranks do not make copies of {given.mesh.described()}: use a"
                f" multiple of {given.shards}"
            )
    if given.ranks % given.shards:
        raise UsageError(
            f"{given.ranks} ranks do not make copies of {given.shards} shards: use a multiple of"
            f" {given.shards}"
        )
    # of this machine it is known whether it has GPUs, of nodes to come it is not
    found = ("cuda",) if given.nodes else ("cuda", "auto")
    if given.backend == "nccl" and given.device not in found:
        raise UsageError("--backend nccl exchanges what is on GPUs: use --device cuda, or gloo")
    if why := strategy.spare_sync.misfit(given.ranks, given.shards, strategy.spares_wanted):
        raise UsageError(why)
    if given.memory_limit * 1e6 < 1:
        raise UsageError(
            f"--memory-limit {given.memory_limit:g} holds nothing: three times the state, or more"
        )
    if given.taint_alarms and given.taints is None:
        raise UsageError("--taint-alarms: say which list, by --taints FILE")
    if given.nodes is None:
        if given.adopt or given.listen or given.token_file:
            raise UsageError(
                "--adopt, --listen and --token-file are for --nodes: on one machine ranks end with"
                " their supervisor"
            )
    elif given.listen is None or given.token_file is None:
        raise UsageError("--nodes needs --listen HOST:PORT and --token-file FILE")
    elif given.memory_checkpoints or given.logs:
        raise UsageError(
            "--memory-checkpoints and --logs are for one machine; what ranks of nodes print is in"
            " EVENTS/logs"
        )
    if given.adopt and given.events is None:
        raise UsageError("--adopt needs --events DIR, the same as of the job")
    if given.nodes and given.nodes > given.ranks + strategy.spares_wanted:
        raise UsageError(
            f"{given.nodes} nodes for {given.ranks + strategy.spares_wanted} processes"
        )


OPTIONS: Sequence[tuple[str, dict[str, Any], str]] = (
    ("--ranks", {"type": positive, "default": 2}, "processes that train (default 2)"),
    (
        "--shards",
        {"type": positive, "default": 1, "metavar": "N"},
        "ranks that hold one copy of the model together (default 1: each holds all of it)",
    ),
    (
        "--mesh",
        {"type": mesh_of, "metavar": "tensor=T,context=C,pipeline=P,shard=S"},
        "how the ranks of a copy are arranged, instead of --shards, for a script that says "
        "to job.attach how its model is cut up",
    ),
    ("--spares", {"type": int}, "processes held ready, for hot-spare (default 1) and adaptive (0)"),
    (
        "--strategy",
        {"default": "hot-spare"},
        f"one of {', '.join(strategies.names())} (default hot-spare)",
    ),
    (
        "--param",
        {"action": "append", "default": [], "metavar": "NAME=VALUE"},
        "a parameter of the strategy",
    ),
    ("--checkpoint-dir", {"type": Path, "metavar": "DIR"}, "instead of what the script says"),
    (
        "--every",
        {"type": interval, "metavar": "STEPS"},
        "steps between checkpoints, or 30s, or auto; see --saves",
    ),
    (
        "--verify-every",
        {"type": count, "metavar": "STEPS"},
        "steps after which replicas compare digests of their state, 0 for never (default: "
        "with each checkpoint)",
    ),
    (
        "--saves",
        {"action": "append", "default": [], "metavar": "NAME=VALUE"},
        "mode=async, sharded=true, delta=K, mtbf_s=SECONDS: how checkpoints are written",
    ),
    (
        "--memory-checkpoints",
        {"type": interval, "metavar": "EVERY"},
        "keep checkpoints in memory besides, every so many steps, or 30s, or auto: they "
        "survive ranks, not this machine",
    ),
    (
        "--memory-limit",
        {"type": room, "default": 4000.0, "metavar": "MB"},
        "memory for them (default 4000)",
    ),
    (
        "--keep",
        {"type": positive, "metavar": "N"},
        "checkpoints kept, instead of what the script says",
    ),
    (
        "--fresh",
        {"action": "store_true"},
        "begin with initial values although there are checkpoints; what this job saves "
        "itself counts",
    ),
    (
        "--events",
        {"type": Path, "metavar": "DIR"},
        "a new directory for the event logs (default runs/recovery-<time>)",
    ),
    (
        "--logs",
        {"type": Path, "metavar": "DIR"},
        "write what ranks print to DIR/<process>.log, not to the terminal",
    ),
    (
        "--log-limit",
        {"type": room, "default": 10.0, "metavar": "GB"},
        "room for event logs and DIR/*.log; the oldest are dropped beyond (default 10)",
    ),
    (
        "--device",
        {"choices": ("auto", "cpu", "cuda"), "default": "auto"},
        "what ranks train on (default auto)",
    ),
    (
        "--backend",
        {"choices": ("auto", "gloo", "nccl"), "default": "auto"},
        "how ranks exchange tensors (default: nccl where each has a GPU of its own, spares "
        "too, else gloo); nccl on fewer GPUs of this machine: they share them, slowly",
    ),
    (
        "--start-timeout",
        {"type": float, "default": 300.0, "metavar": "S"},
        "seconds until a process has to be ready",
    ),
    (
        "--end-timeout",
        {"type": float, "default": 600.0, "metavar": "S"},
        "seconds the script may take after its last step",
    ),
    (
        "--health-reports",
        {"type": Path, "metavar": "FILE"},
        "to which monitors of this machine append reports, a JSON line each "
        "(docs/health.md); NVIDIA's driver is asked without it",
    ),
    (
        "--hang-timeout",
        {"type": seconds, "metavar": "S"},
        "seconds a rank may be silent, whatever it does, and all ranks together (default: "
        "learned from the steps)",
    ),
    (
        "--park-timeout",
        {"type": seconds, "metavar": "S"},
        "least seconds a rank has to leave a generation that is aborted (default 1; more for "
        "long steps)",
    ),
    (
        "--join-timeout",
        {"type": seconds, "metavar": "S"},
        "seconds without a sign of life while a group forms, restores and copies (default 60)",
    ),
    (
        "--taints",
        {"type": Path, "metavar": "FILE"},
        "nodes and devices that are not used while there are others (default: $CHAOS_TAINTS, "
        "or the list of 'chaos taint')",
    ),
    (
        "--taint-alarms",
        {"action": "store_true"},
        "add places to --taints that a report, an alarm or a preflight says are failing",
    ),
    (
        "--preflight-rejoins",
        {"action": "store_true"},
        "use a suspect place again only once it is found fit, or if there is no other",
    ),
    ("--nodes", {"type": positive, "metavar": "N"}, "train on N nodes: wait for their agents"),
    (
        "--listen",
        {"type": listen, "metavar": "HOST:PORT"},
        "for the agents: an address of this machine that all nodes reach",
    ),
    (
        "--token-file",
        {"type": Path, "metavar": "FILE"},
        "the agents' token, hexadecimal, readable by you alone",
    ),
    (
        "--node-timeout",
        {"type": seconds, "default": FleetLimits().node_s, "metavar": "S"},
        "seconds for which the job waits for a node that it needs and does not hear of "
        "(default 15)",
    ),
    (
        "--adopt",
        {"action": "store_true"},
        "take over the job in --events from a supervisor that was killed; a new job if there "
        "is none",
    ),
    ("script", {"type": Path}, ""),
    ("args", {"nargs": argparse.REMAINDER}, "passed to the script"),
)
"""Name, settings for argparse, and help. A limit that is not given is learned from the job."""
