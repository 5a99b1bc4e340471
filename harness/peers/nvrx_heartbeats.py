"""The common job under NVIDIA's ``ft_launcher``, with its heartbeat API as in
``train_ddp_heartbeats_api.py``.

    ft_launcher --nproc-per-node 4 --max-restarts 3 ... harness/peers/nvrx_heartbeats.py
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainchaos.harness.peers.common import Training, join_group, train_step


def main() -> None:
    """Train from the newest checkpoint to the last step, a heartbeat a step."""
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        sys.exit("FT_RANK_MONITOR_IPC_SOCKET is not set: start it by ft_launcher")
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    training = Training.from_environment()
    join_group()
    client = RankMonitorClient()
    client.init_workload_monitoring()
    first = training.load()
    net = DistributedDataParallel(training.model)
    for step in range(first + 1, training.job.steps + 1):
        train_step(training, net, step)
        client.send_heartbeat()
        if step % training.job.every == 0 and dist.get_rank() == 0:
            training.save(step)
    client.shutdown_workload_monitoring()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
