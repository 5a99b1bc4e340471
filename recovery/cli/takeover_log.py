"""What a killed supervisor leaves to the one that takes its job over: the log, and a lock on it."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.events.log import ORCHESTRATOR, ActorLog, Kind, read_actor
from trainchaos.recovery.checkpoint.memory import ROLE as KEEPER
from trainchaos.recovery.nodes.link.clock import boot_id
from trainchaos.recovery.nodes.link.files import LOCK
from trainchaos.recovery.policy.fallback import CORRUPTIONS
from trainchaos.recovery.policy.strategy import Cause

UNWRITTEN = 100  # attempts to start a process of which none is in the log, unless it says so before


@dataclass(frozen=True, kw_only=True)
class LoggedProcess:
    """A process by the log. ``device``: as torch names it; ``gone``: its exit was seen."""

    node: int
    pid: int
    device: str
    gone: bool = False


@dataclass(frozen=True, kw_only=True)
class TakeoverLog:
    """The log of a job that is not over. ``steps``: of the whole job, 0: it has not begun;
    ``epoch``: of the next coordinator; ``processes``: all there ever were, each by its kind and
    number; ``reserved``: below it, any may have been started; ``since_ns``: when the last event was
    written.
    """

    log: ActorLog
    steps: int
    epoch: int
    since_ns: int
    processes: dict[str, LoggedProcess] = field(default_factory=dict)
    reserved: int = 0

    @property
    def failures(self) -> list[tuple[LoggedProcess, Cause, float]]:
        """Each that failed, why, and when, in seconds."""
        return [
            (self.processes[name], Cause(event.data["cause"]), event.time_ns / 1e9)
            for event in self.log.events
            if event.kind is Kind.FAILURE_DETECTED
            and (name := event.data["process"]) in self.processes
        ]

    @property
    def replaced_for_values(self) -> list[LoggedProcess]:
        """Those whose values were wrong, and without which the next generation began."""
        blamed: set[str] = set()
        found: list[str] = []
        for event in self.log.events:
            if event.kind is Kind.FAILURE_DETECTED and event.data["cause"] in CORRUPTIONS:
                blamed.add(event.data["process"])
            elif event.kind is Kind.GENERATION_STARTED:
                found += [name for name in blamed if name not in event.data["members"]]
                blamed = set()
        return [self.processes[name] for name in found if name in self.processes]

    @property
    def names(self) -> int:
        """A number above that of every process so far. Each attempt to start one uses a number up,
        so that there may be fewer processes than numbers; the last attempts of the lost coordinator
        may have succeeded without being in the log.
        """
        last = max((_number(name) for name in self.processes), default=-1)
        return max(last, self.reserved) + 1 + UNWRITTEN

    @property
    def living(self) -> dict[str, tuple[int, int]]:
        """Those that may be alive: node and pid."""
        return {
            name: (left.node, left.pid) for name, left in self.processes.items() if not left.gone
        }


def read_takeover_log(events: Path) -> TakeoverLog | str:
    """The takeover log of the job whose logs are in ``events``; the outcome instead, if it is over.
    Raises InfrastructureError when it cannot be taken over.
    """
    log = read_actor(events / f"{ORCHESTRATOR}.jsonl")
    if log.unread:
        raise InfrastructureError(
            f"the log of the job in {events} cannot be read: {log.problems[0]}",
            hint="start it anew with another --events: it goes on from its newest checkpoint",
        )
    steps, epoch, reserved, processes = 0, 1, 0, dict[str, LoggedProcess]()
    for event in log.events:
        data = event.data
        match event.kind:
            case Kind.EVENTS_DROPPED:
                raise InfrastructureError(
                    f"events {data['first']} to {data['last']} of the job in {events} were dropped"
                    f" ({data['why']}): nobody knows who trains",
                    hint=(
                        "start it anew with another --events: it goes on from its newest checkpoint"
                    ),
                )
            case Kind.RUN_FINISHED:
                return str(data["outcome"])
            case Kind.ACTOR_STARTED:
                epoch += 1
                if data.get("boot") != boot_id():
                    raise InfrastructureError(
                        f"the job in {events} was supervised from another machine, or before this"
                        " one was started anew",
                        hint=(
                            "start it anew with another --events: it goes on from its newest"
                            " checkpoint"
                        ),
                    )
            case Kind.RUN_STARTED:
                steps = data["steps"]
            case Kind.NAMES_RESERVED:
                reserved = max(reserved, data["below"])
            case Kind.PROCESS_SPAWNED if data["role"] != KEEPER:
                processes[data["process"]] = LoggedProcess(
                    node=data["node"], pid=data["pid"], device=data["device"]
                )
            case Kind.PROCESS_EXITED if data["process"] in processes:
                left = processes[data["process"]]
                processes[data["process"]] = LoggedProcess(
                    node=left.node, pid=left.pid, device=left.device, gone=True
                )
    since_ns = log.events[-1].time_ns if log.events else 0
    return TakeoverLog(
        log=log,
        steps=steps,
        epoch=epoch,
        since_ns=since_ns,
        processes=processes,
        reserved=reserved,
    )


def _number(name: str) -> int:
    """The number in ``w12``: 12; -1: it has none."""
    return int(digits) if (digits := name[1:]).isdecimal() else -1


def lock(events: Path) -> int:
    """Lock the job's logs for as long as this process lives; returns the descriptor. Raises
    InfrastructureError when another supervisor holds the lock.
    """
    fd = os.open(events / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise InfrastructureError(
            f"a supervisor that lives holds {events}", hint="end it first, or let it go on"
        ) from error
    return fd
