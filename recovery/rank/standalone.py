"""A job of one rank without a supervisor: a script under a debugger, or a first try."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from trainchaos.chaos.events.log import Event, EventWriter, Kind
from trainchaos.recovery.collectives.lasting.job_mesh import is_a_jobs
from trainchaos.recovery.policy.jobconfig import JobConfig
from trainchaos.recovery.process.local import start_store
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.rank.job import Job
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.progress_counters import MarkPage
from trainchaos.recovery.transport.wire import (
    Finished,
    Join,
    Message,
    Parked,
    Ready,
    StateSource,
    Stop,
)

TIMEOUT_S = 60.0
STARTED_TOGETHER = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""What torchrun, Open MPI and srun set to the number of processes that they start."""


def lone_job(config: JobConfig) -> Job:
    """A job that is its own supervisor: it starts or resumes, and ends, but never recovers.

    Raises RuntimeError in one of several processes that were started together.
    """
    _require_alone(os.environ)
    _let_group_go()  # of one before it in this process, which an error ended
    channel = _Answers(restore=config.checkpoint_dir is not None)
    agent = channel.agent = _OwnAgent(channel)
    config = config.model_copy(update={"job_id": config.job_id or uuid.uuid4().hex})
    mark_fd = progress_counters.create()
    page = MarkPage(mark_fd)
    os.close(mark_fd)  # the page has its own
    return Job(config, agent, page, _Unwritten())


def _require_alone(environment: Mapping[str, str]) -> None:
    for name in STARTED_TOGETHER:
        count = environment.get(name, "")
        if count.isdecimal() and int(count) > 1:
            raise RuntimeError(
                f"{name}={count}: so many processes were started together, and each would train"
                " alone, into the same checkpoints: start the script with python -m"
                f" trainchaos.recovery.run --ranks {count}, or once with python"
            )


def _let_group_go() -> None:
    """Destroy the default process group if it is a job's."""
    if is_a_jobs():
        dist.destroy_process_group()


class _OwnAgent(RankAgent):
    """Lets everything go with the job: its process may go on, and run another."""

    channel: _Answers

    def __init__(self, channel: _Answers) -> None:
        super().__init__(channel, orphaned=channel.close)

    def left(self) -> None:
        super().left()
        if self.channel.over:
            self.channel.hang_up()
            _let_group_go()


class _Answers(Channel):
    """Answers each message at once as a supervisor would; sends nothing."""

    agent: RankAgent

    def __init__(self, *, restore: bool) -> None:
        ours, self._open = socket.socketpair()
        super().__init__(ours)
        self.over = False  # the job has made its last step
        self._restore = restore
        self._store, self._port = start_store()

    def send(self, message: Message) -> bool:
        """Answer the message. Raises RuntimeError when the rank had to park: it has no supervisor
        to recover it.
        """
        if isinstance(message, Ready):
            order = Join(
                generation=1,
                rank=0,
                world=1,
                store_port=self._port,
                timeout_s=TIMEOUT_S,
                state=StateSource(restore=self._restore),
            )
            self.agent.orders.put(order)
        elif isinstance(message, Finished):
            self.over = True
            self.agent.orders.put(Stop())
        elif isinstance(message, Parked):
            why = message.error or "the loss or a gradient is not finite"
            raise RuntimeError(f"step {message.step + 1}: {why}; nobody supervises this job")
        return True

    def hang_up(self) -> None:
        """End the agent's thread, and the store."""
        self._open.close()
        self._store = None


class _Unwritten(EventWriter):
    """Numbers events and keeps none: without a supervisor they have no reader."""

    def __init__(self) -> None:
        self.actor = "alone"
        self.last_seq = -1
        self.generation = 0
        self._fd = -1

    def write(
        self, kind: Kind, /, *, step: int | None = None, generation: int | None = None, **data: Any
    ) -> Event:
        """The numbered event, not kept."""
        self.last_seq += 1
        return Event(
            kind=kind,
            actor=self.actor,
            seq=self.last_seq,
            time_ns=time.monotonic_ns(),
            generation=self.generation if generation is None else generation,
            step=step,
            data=data,
        )
