"""The common job on torch's own fault tolerance: a process group made with ``enable_reconfigure``,
which gets other members while its processes live.

    python -m trainchaos.harness.peers.torch_reconfigure --ranks 4 [--restarts 3] [--join-limit S]
        -- [--group-timeout S] [--reconfigure-timeout S]

The launcher starts the ranks, holds the store in which they meet (a ``TCPStore``), starts a rank
that ended again, and says who the next group is. A rank that finds its group broken leaves it,
gives the store its handle and its step, and waits for the launcher's plan: the handles of all who
are there, in the order of their numbers, under a uuid that was never used. Who is behind the one
with the most steps gets its state by broadcast, and the step is done again. Who does not answer in
time is killed. A rank that was started again joins after a step.

Every number and handle travels as JSON. With a GPU for each rank the group is of ``nccl2``, else of
gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainchaos.harness.peers.common import Training
from trainchaos.harness.peers.supervise import (
    HOST,
    LOOK_S,
    START_LIMIT_S,
    PeerSupervisor,
    job_of_environment,
    rank_environments,
    say,
)
from trainchaos.harness.script.processes.guard import kill, stat

c10d: Any = dist
"""What came with torch 2.14 is in no older stub."""
ANSWER_LIMIT_S = 90.0
"""So long a rank waits for anything in the store: longer than the launcher waits for a start."""
COLLECT_S = 0.002
NEXT = "next"
"""The number of the group that is formed next: also its uuid."""


class GroupBroken(Exception):
    """A collective failed, or a newer group could not be formed."""


class Launcher(PeerSupervisor):
    """The ranks, and the store in which they agree. ``join_limit``: seconds that a member of the
    last group has, after another one found it broken, before it counts as hung and is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        store: Any,
        *,
        restarts: int,
        join_limit: float,
    ) -> None:
        super().__init__(command, environments, restarts=restarts)
        self._store, self._join_limit = store, join_limit
        self._members: set[int] = set()
        self._open(1)

    def _open(self, number: int) -> None:
        self._number = number
        self._store.set(NEXT, str(number))

    def _look(self, pid: int, limit_s: float = LOOK_S) -> bool:
        """Also forms a group when it is asked to; a death is seen with the next question."""
        # the first group, and one after all have died, is wanted by ranks that have just started
        key = "asked" if self._there(self._members) else "wanted"
        try:
            self._store.wait([f"{self._number}/{key}"], timedelta(seconds=limit_s))
        except dist.DistStoreError:  # nobody wants one
            return super()._look(pid, 0.0)
        self._form()
        return super()._look(pid, 0.0)

    def _there(self, pids: set[int]) -> set[int]:
        return {pid for pid in pids if pid in self._living and pid not in self._ended}

    def _form(self) -> None:
        old = self._there(self._members)
        deadline = time.monotonic() + (self._join_limit if old else START_LIMIT_S)
        while late := self._late(old):
            if time.monotonic() > deadline:
                break
            super()._look(0, COLLECT_S)
        for pid in late:
            say(f"rank {self._living[pid]} does not answer, and is killed")
            if (row := stat(pid)) is not None:
                kill(pid, row[2])
        answers = {
            self._living[pid]: (pid, json.loads(self._store.get(self._key(pid))))
            for pid in self._there(set(self._living)) - late
            if self._store.check([self._key(pid)])
        }
        ranks = sorted(answers)
        if not ranks:  # all have died meanwhile
            self._members = set()
            self._open(self._number + 1)
            return
        ahead = max(ranks, key=lambda rank: answers[rank][1]["step"])
        plan = {
            "ranks": ranks,
            "handles": [answers[rank][1]["handle"] for rank in ranks],
            "source": ranks.index(ahead),
            "send": any(
                answer["step"] != answers[ahead][1]["step"] for _, answer in answers.values()
            ),
            **{key: answers[ahead][1][key] for key in ("step", "loss", "scheduler")},
        }
        number, self._members = self._number, {pid for pid, _ in answers.values()}
        self._open(number + 1)
        self._store.set(f"{number}/plan", json.dumps(plan))

    def _late(self, old: set[int]) -> set[int]:
        return {
            pid
            for pid in self._there(old or set(self._living))
            if not self._store.check([self._key(pid)])
        }

    def _key(self, pid: int) -> str:
        return f"{self._number}/{pid}"


class Rank:
    """One rank. ``group``: number of the group that it is in, 0 before the first; ``step``: done by
    it; ``tried``: (step, samples) that it gave its share to last.
    """

    def __init__(self, training: Training, store: Any, options: argparse.Namespace) -> None:
        self.training, self.store = training, store
        self.number, self.timeout = int(os.environ["JOB_RANK"]), options.reconfigure_timeout
        backend = "nccl2" if on_gpus(training.job.ranks) else "gloo"
        c10d.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=self.number,
            world_size=training.job.ranks,
            timeout=timedelta(seconds=options.group_timeout),
            enable_reconfigure=True,
        )
        self.device = next(training.model.parameters()).device
        self.backend: Any = c10d.get_backend_impl(dist.group.WORLD, self.device)
        self.group = self.attempts = 0
        self.step, self.tried, self.loss = training.load(), (0, 0), 0.0

    def run(self) -> None:
        """To the last step, in as many groups as it takes."""
        steps = self.training.job.steps
        while self.step < steps:
            try:
                self._join()
                while self.step < steps and not self._train_step():
                    pass
            except GroupBroken:
                self._leave()
        with contextlib.suppress(GroupBroken), whole():
            dist.barrier()  # who ends first would break the last step of the others
        dist.destroy_process_group()

    def _leave(self) -> None:
        """Gloo's ``abort`` does nothing, and peers that wait for each other would wait for their
        timeout: a group of this process alone closes its connections to them.
        """
        self.backend.abort()
        self.attempts += 1
        with contextlib.suppress(GroupBroken), whole():
            alone = os.getpid() << 20 | self.attempts
            self._reconfigure(alone, [c10d._get_reconfigure_handle()])

    def _join(self) -> None:
        """Into the next group that has a place for this process."""
        if self.group:
            self.store.set(f"{self.group + 1}/asked", "")
        while (plan := self._planned()) is None:
            pass
        with whole():
            self._reconfigure(self.group, plan["handles"])
            if plan["send"]:
                self._receive(plan)

    def _planned(self) -> dict[str, Any] | None:
        """The launcher's plan, for the answer given to it; None: it was made without this
        process.
        """
        number = self.store.get(NEXT).decode()
        answer = {
            "handle": c10d._get_reconfigure_handle(),
            "step": self.step,
            "loss": self.loss,
            "scheduler": self.training.scheduler.state_dict(),
        }
        self.store.set(f"{number}/{os.getpid()}", json.dumps(answer))
        self.store.set(f"{number}/wanted", "")
        plan: dict[str, Any] = json.loads(self.store.get(f"{number}/plan"))
        if answer["handle"] not in plan["handles"]:
            return None
        self.group = int(number)
        return plan

    def _reconfigure(self, uuid: int, handles: list[str]) -> None:
        limit = timedelta(seconds=self.timeout)
        c10d._reconfigure(uuid, handles, timeout=limit).wait()

    def _receive(self, plan: Mapping[str, Any]) -> None:
        """The state of the rank with the most steps, in one broadcast."""
        training = self.training
        tensors = list(state_tensors(training.model, training.optimizer))
        flat = torch.cat([one.reshape(-1).to(self.device, torch.float32) for one in tensors])
        dist.broadcast(flat, group_src=plan["source"])
        if plan["step"] == self.step:
            return
        with torch.no_grad():
            parts = flat.split([one.numel() for one in tensors])
            for one, part in zip(tensors, parts, strict=True):
                one.copy_(part.view_as(one))
        training.scheduler.load_state_dict(dict(plan["scheduler"]))
        for group, rate in zip(
            training.optimizer.param_groups, training.scheduler.get_last_lr(), strict=True
        ):
            group["lr"] = rate
        self.step, self.loss = plan["step"], plan["loss"]
        if self.tried[0] == self.step:  # the others have finished it with this rank's share
            training.report(self.step, self.loss, self.tried[1])

    def _train_step(self) -> bool:
        """Gradients, loss, and whether a rank waits to join, in one all-reduce; returns the
        last.
        """
        training, step = self.training, self.step + 1
        rank, world = dist.get_rank(), dist.get_world_size()
        training.optimizer.zero_grad()
        ids = training.ids(step, rank, world)
        loss = training.loss(training.model, step, rank, ids)
        training.backward(loss / training.job.global_batch)
        gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
        wanted = rank == 0 and self.store.check([f"{self.group + 1}/wanted"])
        words = torch.tensor([float(loss), float(wanted)], device=self.device)
        flat = torch.cat([*(one.reshape(-1) for one in gradients), words])
        self.tried = step, len(ids)
        with whole():
            dist.all_reduce(flat)
            total, waits = flat[-2:].tolist()
            if self.backend.get_error().name != "SUCCESS":
                raise RuntimeError("the group was aborted")
        parts = flat[:-2].split([one.numel() for one in gradients])
        for one, part in zip(gradients, parts, strict=True):
            one.copy_(part.view_as(one))
        training.apply()
        self.step, self.loss = step, total / training.job.global_batch
        training.report(step, self.loss, len(ids))
        if step % training.job.every == 0 and rank == 0:
            training.save(step)
        return waits > 0


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Around calls of the group: what torch raises in it is ``GroupBroken``."""
    try:
        yield
    except RuntimeError as error:
        print(f"torch_reconfigure: {str(error)[:200]}", file=sys.stderr, flush=True)
        raise GroupBroken from error


def state_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Parameters, buffers and the optimizer's tensors, in the same order on every rank; those that
    AdamW makes with its first step are made here if there was none.
    """
    yield from (one.detach() for one in model.parameters())
    yield from model.buffers()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        yield from (state[name] for name in ("step", "exp_avg", "exp_avg_sq"))


def on_gpus(ranks: int) -> bool:
    """Whether there is a GPU for each rank."""
    return torch.cuda.is_available() and torch.cuda.device_count() >= ranks


def store_of(port: int, *, master: bool) -> Any:
    """The store in which all meet; the launcher's process holds it."""
    return dist.TCPStore(
        HOST,
        port,
        is_master=master,
        wait_for_workers=False,
        timeout=timedelta(seconds=ANSWER_LIMIT_S),
    )


def train(words: Sequence[str]) -> None:
    """One rank, as the launcher starts it."""
    parser = argparse.ArgumentParser(prog="torch_reconfigure train")
    parser.add_argument("--group-timeout", type=float, default=30.0, metavar="S")
    parser.add_argument("--reconfigure-timeout", type=float, default=30.0, metavar="S")
    options = parser.parse_args(words)
    os.environ["RANK"] = os.environ["JOB_RANK"]
    device = f"cuda:{os.environ['JOB_RANK']}" if on_gpus(int(os.environ["WORLD_SIZE"])) else "cpu"
    training = Training.from_environment(device=device)
    Rank(training, store_of(int(os.environ["MASTER_PORT"]), master=False), options).run()


def main() -> None:
    """The launcher."""
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        prog="python -m trainchaos.harness.peers.torch_reconfigure", description=__doc__
    )
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=0, help="of each rank")
    parser.add_argument("--join-limit", type=float, default=1.0, metavar="S")
    parser.add_argument("script", nargs="*", help="options of a rank")
    options = parser.parse_args()
    job_of_environment()
    if not hasattr(dist, "_reconfigure"):
        raise SystemExit(
            f"torch {torch.__version__} cannot reconfigure a group: it came with 2.14\n"
            "  chaos stacks install torch-reconfigure"
        )
    environments = rank_environments(options.ranks)
    store = store_of(int(environments[0]["MASTER_PORT"]), master=True)
    module = "trainchaos.harness.peers.torch_reconfigure"
    command = [sys.executable, "-m", module, "train", *options.script]
    launcher = Launcher(
        command, environments, store, restarts=options.restarts, join_limit=options.join_limit
    )
    sys.exit(launcher.run())


if __name__ == "__main__":
    main()
