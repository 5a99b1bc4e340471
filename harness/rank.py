"""What runs in a rank's process: connect to the supervisor, build the workload, train until told to stop.

Started as ``python -m harness.rank`` (cold) or in a fork of the zygote (warm); both come to ``run``.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict

from chaos.events import EventWriter, Kind
from recovery import processes
from recovery.agent import Agent
from recovery.marks import MarkPage
from recovery.wire import Channel

if TYPE_CHECKING:
    from recovery.job import JobConfig

EXIT_ERROR = 1


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
    processes.die_with(config.parent)
    processes.redirect_output(config.log)
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


def start(config: bytes, control_fd: int, mark_fd: int) -> NoReturn:
    """A fork of the zygote becomes the rank that ``config``, a RankConfig as JSON, describes."""
    run(RankConfig.model_validate_json(config), control_fd, mark_fd)


def main() -> NoReturn:
    """Cold start: descriptors and the configuration's file descriptor come as arguments."""
    control_fd, mark_fd, config_fd = (int(value) for value in sys.argv[1:4])
    with os.fdopen(config_fd, "rb") as stream:
        config = RankConfig.model_validate_json(stream.read())
    run(config, control_fd, mark_fd)


if __name__ == "__main__":
    main()
