"""The common job under NVIDIA's in-process restart, as its ``optimal_example.py`` has it; started
by ``supervise``.

    python -m trainchaos.harness.peers.supervise --ranks 4 -- \
        python -m trainchaos.harness.peers.nvrx_inprocess [options]

Model and optimizer are built once; the wrapped function forms a group, loads the newest checkpoint
and trains, and is called again by the wrapper on all ranks that are left whenever one of them
fails. The options are arguments of ``inprocess.Wrapper`` in seconds, and ``--group-timeout`` that
of the gloo group.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainchaos.harness.peers.common import Training, train_step

WAITS = (
    "monitor_thread_interval",
    "monitor_process_interval",
    "heartbeat_interval",
    "progress_watchdog_interval",
    "soft_timeout",
    "hard_timeout",
    "heartbeat_timeout",
    "barrier_timeout",
    "completion_timeout",
    "last_call_wait",
    "termination_grace_time",
)
"""Arguments of the wrapper that are times; one not given has the wrapper's default."""


def main() -> None:
    """Build once, then train under the wrapper."""
    parser = argparse.ArgumentParser(
        prog="python -m trainchaos.harness.peers.nvrx_inprocess", description=__doc__
    )
    parser.add_argument("--group-timeout", type=float, default=10.0, metavar="S")
    parser.add_argument(
        "--spares", type=int, default=0, help="ranks that wait in reserve for one that is lost"
    )
    for name in WAITS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="S")
    options = parser.parse_args()
    if "JOB_RANK" not in os.environ or "MASTER_PORT" not in os.environ:
        sys.exit("JOB_RANK and MASTER_PORT are not set: start it by harness.peers.supervise")
    os.environ["RANK"] = os.environ["JOB_RANK"]
    logging.basicConfig(level=logging.INFO)
    waits = {
        name: timedelta(seconds=value)
        for name in WAITS
        if (value := getattr(options, name)) is not None
    }
    run(waits, timedelta(seconds=options.group_timeout), options.spares)


def run(waits: dict[str, timedelta], group_timeout: timedelta, spares: int) -> None:
    """The wrapper's own store is two ports above the job's, this script's one above, as in the
    example. ``spares``: of the processes started, as the usage guide's reserve workers; the highest
    takes the number of the rank that is lost.
    """
    from nvidia_resiliency_ext import inprocess

    training = Training.from_environment()
    initial = copy.deepcopy(training.state(0))
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        host,
        port + 1,
        world_size=world,
        is_master=rank == 0,
        multi_tenant=True,
        wait_for_workers=True,
    )

    def attempt(call_wrapper: inprocess.CallWrapper | None = None) -> None:
        call: Any = call_wrapper
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call.iteration), store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=group_timeout,
        )
        training.optimizer.zero_grad()
        # without a checkpoint NVIDIA's example goes on with what it has, as step 0
        first = training.load() or training.restore(initial)
        net = DistributedDataParallel(training.model)
        for step in range(first + 1, training.job.steps + 1):
            train_step(training, net, step)
            if step % training.job.every == 0 and dist.get_rank() == 0:
                with call.atomic():
                    training.save(step)
        dist.destroy_process_group()

    # looked up as a type by the wrapper
    attempt.__annotations__["call_wrapper"] = inprocess.CallWrapper
    log = str((training.checkpoints.parent / "monitor-{rank}.log").absolute())
    more: dict[str, Any] = dict(waits)
    if spares:
        assignment = inprocess.rank_assignment
        more["rank_assignment"] = inprocess.Compose(
            assignment.MaxActiveWorldSize(world - spares), assignment.FillGaps()
        )
    inprocess.Wrapper(store_kwargs={"port": port + 2}, monitor_process_logfile=log, **more)(
        attempt
    )()


if __name__ == "__main__":
    main()
