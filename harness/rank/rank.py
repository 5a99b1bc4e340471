"""A rank's process: connects to the supervisor, builds the workload, and trains until told to stop.

Started as ``python -m trainchaos.harness.rank.rank`` (cold) or in a fork of the zygote (warm);
both call ``run``.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from trainchaos.chaos import plugins
from trainchaos.chaos.events.log import EventWriter
from trainchaos.harness.launch.links.route import Router
from trainchaos.harness.launch.rank_config import RankConfig
from trainchaos.harness.launch.stores import StoreConfig, be_store
from trainchaos.harness.launch.workload import Workload
from trainchaos.recovery.checkpoint.memory.keeper import KEEPER, KeeperConfig, be_keeper
from trainchaos.recovery.process.entry import live
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.rank.joining import SupervisedPlace, SupervisorSettings
from trainchaos.recovery.rank.script import run_script
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.progress_counters import MarkPage

if TYPE_CHECKING:
    from trainchaos.recovery.rank.job import Job


def run(config: RankConfig, control_fd: int, mark_fd: int) -> NoReturn:
    """Be that rank; never returns."""
    live(config, control_fd, mark_fd, partial(_train, config))


def _train(config: RankConfig, channel: Channel, page: MarkPage, writer: EventWriter) -> None:
    workload = plugins.one(plugins.WORKLOADS, Workload, config.workload)(**config.workload_params)
    program = workload.program()
    if program is None:
        _train_built(config, channel, page, writer)
        return
    import torch

    torch.set_num_threads(config.threads)
    settings = SupervisorSettings(supervisor="the scenario", **config.job)
    admit = partial(_admit_faults, config)
    place = SupervisedPlace(
        settings=settings, channel=channel, page=page, writer=writer, on_attach=admit
    )
    run_script(program.path, program.args, place)


def _train_built(config: RankConfig, channel: Channel, page: MarkPage, writer: EventWriter) -> None:
    from trainchaos.harness.rank.training import build, train, warm_up
    from trainchaos.recovery.rank.job import Job, JobConfig

    job_config: JobConfig = JobConfig.model_validate(config.job)
    trainable = build(config, job_config)
    job = Job(job_config, RankAgent(channel), page, writer)
    job.on_attach = partial(_admit_faults, config)
    job.attach(
        trainable.model,
        trainable.make_optimizer,
        trainable.make_scheduler,
        clip_norm=trainable.clip_norm,
        units=trainable.units,
        parallelize=None if job_config.arranged.plain else trainable.parallelize,
    )
    warm_up(job, trainable)
    train(job, trainable, config.evaluate)


def _admit_faults(config: RankConfig, job: Job) -> None:
    """Let faults act in this rank from now on."""
    from trainchaos.harness.rank.fault_agent import FaultAgent

    router = Router(config.name, config.link_proxy) if config.link_proxy is not None else None
    job.dial = router
    faults = FaultAgent(job, config.group, config.faults)
    job.probe = faults
    job.agent.on_extra = faults.on_command


def start(config: bytes, control_fd: int, mark_fd: int) -> NoReturn:
    """Turn a fork of the zygote into the process that ``config`` describes: a RankConfig,
    StoreConfig or KeeperConfig as JSON.
    """
    if config.startswith(KEEPER):
        be_keeper(
            KeeperConfig.model_validate_json(config), Channel(socket.socket(fileno=control_fd))
        )
    if config.startswith(b'{"be":"store'):
        be_store(StoreConfig.model_validate_json(config), Channel(socket.socket(fileno=control_fd)))
    run(RankConfig.model_validate_json(config), control_fd, mark_fd)


def main() -> NoReturn:
    """Cold start: the arguments are the descriptors, including the configuration file's."""
    control_fd, mark_fd, config_fd = (int(value) for value in sys.argv[1:4])
    with os.fdopen(config_fd, "rb") as stream:
        config = RankConfig.model_validate_json(stream.read())
    run(config, control_fd, mark_fd)


if __name__ == "__main__":
    main()
