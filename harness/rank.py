"""What runs in a rank's process: connect to the supervisor, build the workload, train until told to stop.

Started as ``python -m harness.rank`` (cold) or in a fork of the zygote (warm); both come to ``run``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict

from chaos.events import EventWriter, Kind
from recovery.agent import Agent
from recovery.marks import MarkPage
from recovery.wire import Channel

if TYPE_CHECKING:
    from recovery.job import JobConfig

EXIT_ERROR = 1
EXIT_ORPHANED = 70
_PR_SET_PDEATHSIG = 1


class RankConfig(BaseModel):
    """Everything a rank process is told at birth. ``parent``: pid that must be its parent; ``job``: a JobConfig."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    role: Literal["worker", "spare"]
    parent: int
    events: Path
    log: Path
    workload: str
    workload_params: dict[str, Any]
    data: Path
    device: str
    threads: int
    job: dict[str, Any]


def run(config: RankConfig, control_fd: int, mark_fd: int) -> NoReturn:
    """Be that rank; never returns."""
    _die_with(config.parent)
    _redirect_output(config.log)
    writer = EventWriter(config.events, config.name, time.monotonic_ns)
    page = MarkPage(mark_fd)
    writer.write(Kind.ACTOR_STARTED, pid=os.getpid(), host=socket.gethostname(), wall_ns=time.time_ns())
    page.wrote(writer.last_seq)
    code = 0
    try:
        _train(config, Channel(socket.socket(fileno=control_fd)), page, writer)
        writer.close()
    except Exception as error:
        traceback.print_exc()
        page.wrote(writer.write(Kind.ERROR_RAISED, type=type(error).__name__, message=str(error)[:500]).seq)
        code = EXIT_ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: tearing torch down takes a tenth of a second in which the others would not know.
    os._exit(code)


def _train(config: RankConfig, channel: Channel, page: MarkPage, writer: EventWriter) -> None:
    from harness.rank_faults import FaultAgent
    from harness.training import build, train, warm_up
    from recovery.job import Job, JobConfig

    job_config: JobConfig = JobConfig.model_validate(config.job)
    agent = Agent(channel)
    trainable = build(config, job_config)
    job = Job(job_config, agent, page, writer)
    job.attach(trainable.model, trainable.optimizer, trainable.scheduler, clip_norm=trainable.clip_norm)
    faults = FaultAgent(job)
    job.probe = faults
    agent.on_extra = faults.on_command
    warm_up(job, trainable)
    agent.start()
    job.ready()
    train(job, trainable)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent goes, so that no exit of the harness leaves an orphan."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the request was in place
        os._exit(EXIT_ORPHANED)


def _redirect_output(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def main() -> NoReturn:
    """Cold start: descriptors and the configuration's file descriptor come as arguments."""
    control_fd, mark_fd, config_fd = (int(value) for value in sys.argv[1:4])
    with os.fdopen(config_fd, "rb") as stream:
        config = RankConfig.model_validate_json(stream.read())
    run(config, control_fd, mark_fd)


if __name__ == "__main__":
    main()
