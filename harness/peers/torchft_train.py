"""One replica of the common job under torchft, as its ``train_ddp.py`` has it; started by
``torchft_replicas``.

Each replica computes the share of the global batch that its number has, as torchft's
``DistributedSampler`` does: the share of a replica that is missing is left out of the step. Which
step that is, ``Manager.current_step`` says.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore

from trainchaos.harness.peers.common import Training, point
from trainchaos.harness.peers.supervise import HOST, free_ports

START_LIMIT_S = 60.0
"""The first replica there waits so long for the others before it begins; a restarted one does not
wait.
"""


class Replica:
    """The training of one replica. ``group_timeout``: seconds, of collectives; ``timeout``: of all
    else but a quorum; ``flat``: gradients are summed by ``Manager.allreduce`` and not by torchft's
    DistributedDataParallel.
    """

    def __init__(self, training: Training, options: argparse.Namespace) -> None:
        import torchft

        self.training, self.flat = training, options.gradients == "flat"
        self.number, self.replicas = int(os.environ["REPLICA_GROUP_ID"]), training.job.ranks
        store = TCPStore(HOST, free_ports(1), is_master=True, wait_for_workers=False)
        self.manager: Any = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=options.group_timeout)),
            load_state_dict=training.restore,
            state_dict=lambda: training.state(self.manager.current_step()),
            min_replica_size=options.min_replicas,
            timeout=timedelta(seconds=options.timeout),
            quorum_timeout=timedelta(seconds=options.quorum_timeout),
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=store.port,
            replica_id=f"replica_{self.number}",
            hostname=HOST,
            init_sync=False,
        )
        self.store = store
        self.net: nn.Module = training.model
        if not self.flat:
            self.net = torchft.DistributedDataParallel(self.manager, training.model)
        self.optimizer: Any = torchft.Optimizer(self.manager, training.optimizer)

    def run(self) -> None:
        """From the newest checkpoint, or where the others are, to the end."""
        first = self.training.load()
        if first:
            self.manager.load_state_dict(
                {"step": first, "batches_committed": first * self.replicas}
            )
        self._await_others()
        while self.manager.current_step() < self.training.job.steps:
            if self._step():
                step = self.manager.current_step()
                if step % self.training.job.every == 0 and self.manager.participating_rank() == 0:
                    self.training.save(step)
        self.manager.shutdown(wait=False)

    def _step(self) -> bool:
        """One attempt; whether it was committed."""
        training, manager = self.training, self.manager
        before = manager.current_step()
        self.optimizer.zero_grad()  # asks for a quorum
        ids = training.ids(before + 1, self.number, self.replicas)
        loss = training.loss(self.net, before + 1, self.number, ids)
        total = loss.detach().clone()
        word = manager.allreduce(total)
        training.backward(loss * (self.replicas / training.job.global_batch))
        if self.flat:
            self._sum_gradients()
        word.wait()
        point("optimizer", before + 1)
        if training.clip_norm:
            nn.utils.clip_grad_norm_(training.model.parameters(), training.clip_norm)
        counted = manager.is_participating()
        before = manager.current_step()  # that of the others, if this replica has just been healed
        self.optimizer.step()  # only if all have agreed to commit
        if manager.current_step() == before:
            return False
        training.scheduler.step()
        # torchft divides by the participants: the mean over what of the global batch was there
        mean = float(total) * self.replicas / training.job.global_batch
        training.report(manager.current_step(), mean, len(ids) if counted else 0)
        return True

    def _sum_gradients(self) -> None:
        parameters = [one for one in self.training.model.parameters() if one.grad is not None]
        flat = torch.cat([_gradient(one).reshape(-1) for one in parameters])
        self.manager.allreduce(flat).wait()
        for one, part in zip(
            parameters, flat.split([one.numel() for one in parameters]), strict=True
        ):
            _gradient(one).copy_(part.view_as(one))

    def _await_others(self) -> None:
        """Every replica's heartbeat has begun before one asks for a quorum: else whoever is first
        begins alone.
        """
        here = self.training.checkpoints.parent / "started"
        here.mkdir(parents=True, exist_ok=True)
        (here / str(self.number)).touch()
        deadline = time.monotonic() + START_LIMIT_S
        while len(list(here.iterdir())) < self.replicas and time.monotonic() < deadline:
            time.sleep(0.01)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def main() -> None:
    """The options are those that ``harness.compare.stacks.torchft`` chooses."""
    parser = argparse.ArgumentParser(
        prog="python -m trainchaos.harness.peers.torchft_train", description=__doc__
    )
    parser.add_argument("--gradients", choices=("ddp", "flat"), default="ddp")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--group-timeout", type=float, default=5.0, metavar="S")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S")
    parser.add_argument("--quorum-timeout", type=float, default=60.0, metavar="S")
    options = parser.parse_args()
    if "REPLICA_GROUP_ID" not in os.environ or "TORCHFT_LIGHTHOUSE" not in os.environ:
        sys.exit(
            "REPLICA_GROUP_ID and TORCHFT_LIGHTHOUSE are not set: start it by"
            " harness.peers.torchft_replicas"
        )
    Replica(Training.from_environment(), options).run()


if __name__ == "__main__":
    main()
