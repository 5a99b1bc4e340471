"""Ranks of a job on threads of this process, each on a GPU of ``nccl_contract``; the test plays the
supervisor.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.fakes.orders import join
from tests.support.gpu.nccl_contract import Gpus
from tests.support.running import LIMIT_S
from trainchaos.chaos.events.log import Event, EventWriter, Kind, read_actor
from trainchaos.recovery.rank.agent import RankAgent
from trainchaos.recovery.rank.job import Job, JobConfig
from trainchaos.recovery.transport import progress_counters
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.progress_counters import MarkPage
from trainchaos.recovery.transport.wire import (
    Abort,
    CheckpointNote,
    Digest,
    Message,
    Ready,
    Stop,
)

WIDTH = 6


def network() -> nn.Module:
    """Several buckets, if these are small; always the same."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def batch(samples: list[int]) -> Tensor:
    """A row for each of them."""
    return torch.stack([torch.linspace(-1, 1, WIDTH) * (sample % 7 + 1) / 7 for sample in samples])


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """It counts its steps on the CPU, as torch's default does."""
    return torch.optim.AdamW(parameters, lr=0.02)


class GpuRank:
    """One of them. ``spoil``: changes its loss of a step; ``hold``: called before the backward pass
    of a step.
    """

    def __init__(
        self, directory: Path, gpus: Gpus, store_port: int, gpu: int, *, world: int, **options: Any
    ) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(LIMIT_S)
        self.name, self.gpus, self.device = f"w{gpu}", gpus, f"cuda:{gpu}"
        self.channel, self._theirs = Channel(ours), Channel(theirs)
        self._port = store_port
        (directory / "events").mkdir(exist_ok=True)
        self.directory = directory
        writer = EventWriter(directory / "events", self.name, lambda: 1)
        given: dict[str, Any] = {
            "steps": 4,
            "verify_every": 0,
            "checkpoint_dir": None,
            "checkpoint_every": 0,
        } | options
        config = JobConfig(
            process=self.name,
            world=world,
            global_batch=8,
            samples=64,
            seed=5,
            checkpoint_keep=2,
            backend="nccl",
            device=self.device,
            collective_timeout_s=LIMIT_S,
            **given,
        )
        self.spoil: Callable[[int, Tensor], Tensor] = lambda step, loss: loss
        self.hold: Callable[[int], None] = lambda step: None
        self.waits: list[int] = []  # for the device, in each step that was committed
        self.error: BaseException | None = None
        self._heard: list[Any] = []
        self.ready = threading.Event()
        self._thread = threading.Thread(
            target=self._live, args=(config, writer, theirs), daemon=True
        )
        self._thread.start()
        self.hear(Ready)

    def _live(self, config: JobConfig, writer: EventWriter, theirs: socket.socket) -> None:
        try:
            with self.gpus.on():
                self._train(config, writer)
        except BaseException as error:
            self.error = error
            theirs.shutdown(socket.SHUT_RDWR)

    def _train(self, config: JobConfig, writer: EventWriter) -> None:
        page = MarkPage(progress_counters.create())
        self.job = job = Job(config, RankAgent(self._theirs, orphaned=lambda: None), page, writer)
        self.model = model = network().to(self.device)
        job.attach(model, adam(list(model.parameters())), clip_norm=0.5)
        while job.running():
            since = self.gpus.waited()
            with job.step() as step:
                for samples in step.batches():
                    self.hold(step.number)
                    loss = self.spoil(
                        step.number, model(batch(samples).to(self.device)).square().sum()
                    )
                    step.backward(loss)
                step.commit()
                self.waits.append(self.gpus.waited() - since)

    def tell(self, message: Message) -> None:
        """Send it an order."""
        assert self.channel.send(message)

    def join(
        self, generation: int, rank: int, world: int, *, source: int = -1, receives: bool = False
    ) -> None:
        """Order it into a generation."""
        self.tell(
            join(
                generation,
                rank=rank,
                world=world,
                store_port=self._port,
                source=source,
                receives=receives,
                timeout_s=LIMIT_S,
            )
        )

    def abort(self, generation: int) -> None:
        """Order it out of a generation."""
        self.tell(Abort(generation=generation))

    def hear(self, kind: type[Message]) -> Any:
        """The next message of that type; notes and digests in between are skipped."""
        while True:
            if not self._heard:
                messages = self.channel.receive()
                if messages is None:
                    self._thread.join(LIMIT_S)
                    raise AssertionError(f"{self.name} ended: {self.error!r}")
                assert messages, (
                    f"{self.name} says nothing for {LIMIT_S:g} s; another may have ended"
                )
                self._heard.extend(messages)
            message = self._heard.pop(0)
            if isinstance(message, kind):
                return message
            assert isinstance(message, CheckpointNote | Digest), message

    def stop(self) -> None:
        """Order it to end, and see that it does."""
        self.tell(Stop())
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive() and self.error is None, self.error

    def events(self, *kinds: Kind) -> list[Event]:
        """What it wrote."""
        found = read_actor(self.directory / "events" / f"{self.name}.jsonl").events
        return [event for event in found if event.kind in kinds]

    def numbers(self) -> dict[str, list[float]]:
        """Its state, read from outside."""
        with torch._C.DisableTorchFunction():
            return {
                name: tensor.flatten().tolist() for name, tensor in self.job.state.parts().items()
            }
