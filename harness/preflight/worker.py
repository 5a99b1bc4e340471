"""The process of a place: it takes orders, measures, and answers. Loaded by the fork server."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from trainchaos.harness.preflight.checks import exchange
from trainchaos.harness.preflight.checks.check import Check, Task
from trainchaos.harness.preflight.checks.clocks import ClocksCheck
from trainchaos.harness.preflight.checks.disk import DiskCheck
from trainchaos.harness.preflight.checks.memory import MemoryCheck
from trainchaos.harness.preflight.checks.product import ProductCheck
from trainchaos.harness.preflight.checks.store import StoreCheck
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.local import start_store
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.wire import Extra

TOPIC = "preflight"
CHECKS: Mapping[str, Check] = {
    one.name: one
    for one in (MemoryCheck(), ProductCheck(), ClocksCheck(), DiskCheck(), StoreCheck())
}
SERVE, EXCHANGE = "serve-store", "exchange"
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
    held: list[Any] = []
    while (orders := channel.receive()) is not None:
        for order in orders:
            if isinstance(order, Extra) and order.topic == TOPIC:
                channel.send(Extra(topic=TOPIC, payload=_answer(order.payload, held)))


def _answer(order: Mapping[str, Any], held: list[Any]) -> dict[str, Any]:
    """``found``, or ``error`` with its type. ``held``: what lives on, such as a store."""
    number = order["number"]
    try:
        return {"number": number, "found": _do(str(order["do"]), Task(**order["task"]), held)}
    except Exception as error:
        words = str(error).strip().splitlines() or [""]
        return {"number": number, "error": words[0][:MOST_WORDS], "type": type(error).__name__}


def _do(what: str, task: Task, held: list[Any]) -> Mapping[str, Any]:
    if what == SERVE:
        store, port = start_store(str(task.options["host"]))
        held.append(store)
        return {"port": port}
    if what == EXCHANGE:
        return exchange.measure(task)
    return CHECKS[what].measure(task)
