"""The process of a place: it takes orders, measures, and answers. Loaded by the fork server."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from trainchaos.harness.preflight.checks.check import SERVE, Check, Measured, Task
from trainchaos.harness.preflight.checks.clocks import ClocksCheck
from trainchaos.harness.preflight.checks.disk import DiskCheck
from trainchaos.harness.preflight.checks.links import AllReduce, Bandwidth
from trainchaos.harness.preflight.checks.memory import MemoryCheck
from trainchaos.harness.preflight.checks.product import ProductCheck
from trainchaos.harness.preflight.checks.store import StoreCheck
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.local import start_store
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.wire import Extra

TOPIC = "preflight"
ALL_CHECKS: tuple[Check, ...] = (
    MemoryCheck(),
    ProductCheck(),
    ClocksCheck(),
    DiskCheck(),
    StoreCheck(),
    Bandwidth(),
    AllReduce(),
)
CHECKS: Mapping[str, Check] = {check.name: check for check in ALL_CHECKS}
MODULES = (
    "torch",
    "torch.distributed",
    "trainchaos.recovery.collectives.group",
    "trainchaos.harness.preflight.worker",
)
"""What the fork server imports once for all places."""
ENTRY = "trainchaos.harness.preflight.worker:start"
MOST_WORDS = 400


def start(config: bytes, control_fd: int, mark_fd: int) -> NoReturn:
    """Answer orders until there are none: an ``Entry`` of the fork server. ``config``: JSON with
    ``parent``, whose end ends this process.
    """
    born = json.loads(config)
    processes.die_with(int(born["parent"]))
    processes.redirect_output(Path(os.devnull))  # what is wrong is answered; libraries only chatter
    os.close(mark_fd)
    serve(Channel(socket.socket(fileno=control_fd)))
    os._exit(0)  # tearing torch down takes a tenth of a second


def serve(channel: Channel) -> None:
    """Answer each order; an error of the measurement is an answer too."""
    stores: list[Any] = []  # they live as long as this process

    def serve_store(task: Task) -> Measured:
        store, port = start_store(str(task.options["host"]))
        stores.append(store)
        return {"port": port}

    measures: dict[str, Callable[[Task], Measured]] = {SERVE: serve_store}
    measures.update({name: check.measure for name, check in CHECKS.items()})
    while (orders := channel.receive()) is not None:
        for order in orders:
            if isinstance(order, Extra) and order.topic == TOPIC:
                number, task = order.payload["number"], Task(**order.payload["task"])
                answer: dict[str, Any] = {"number": number}
                try:
                    answer["found"] = measures[str(order.payload["do"])](task)
                except Exception as error:
                    words = str(error).strip().splitlines() or [""]
                    answer |= {"error": words[0][:MOST_WORDS], "type": type(error).__name__}
                channel.send(Extra(topic=TOPIC, payload=answer))
