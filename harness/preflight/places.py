"""The places of this machine, a process each: asked to measure, and gone afterwards.

A device that hangs holds up whoever asks it, so that nothing is measured in the process that
judges: it asks over a socket, waits for a stated time, and kills whoever has not answered. The fork
server loads ``start``, which takes orders, measures, and answers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from signal import SIGKILL
from typing import Any, NoReturn

from trainchaos.harness.launch.devices import cuda_devices
from trainchaos.harness.preflight.check import SERVE, Answer, Check, Measured, Task
from trainchaos.harness.preflight.checks import PLACE_CHECKS
from trainchaos.harness.preflight.links import AllReduce, Bandwidth
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.forkserver import ForkServer
from trainchaos.recovery.process.host import Exited, MessageReceived
from trainchaos.recovery.process.local import Children, rank_environment, start_store
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.wire import Extra

TOPIC = "preflight"
ALL_CHECKS: tuple[Check, ...] = (*PLACE_CHECKS, Bandwidth(), AllReduce())
CHECKS: Mapping[str, Check] = {check.name: check for check in ALL_CHECKS}
MODULES = (
    "torch",
    "torch.distributed",
    "trainchaos.recovery.collectives.group",
    "trainchaos.harness.preflight.places",
)
"""What the fork server imports once for all places."""
ENTRY = "trainchaos.harness.preflight.places:start"
MOST_WORDS = 400
CPU_PLACES = 4
"""Emulated places where there is no GPU: as few as can tell which of a slow pair is slow."""
POLL_S = 0.1


def places_here() -> list[str]:
    """The CUDA devices that may be used, or else CPU_PLACES emulated places."""
    count = len(cuda_devices())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = min(count, len([one for one in visible.split(",") if one.strip()]))
    return [f"cuda:{i}" for i in range(count)] or [f"cpu:{i}" for i in range(CPU_PLACES)]


class Places:
    """Starts a process for each name; always ``close``, which leaves none. ``limit_s``: for the
    start, which imports torch. Raises InfrastructureError.

    The kernel ends them with this process, however it ends. ``pids``: of the places, by name.
    """

    def __init__(self, names: Sequence[str], *, limit_s: float) -> None:
        processes.become_subreaper()
        self._number = 0
        self._ended: dict[str, str] = {}
        self.pids: dict[str, int] = {}
        self._server = ForkServer(ENTRY, MODULES, rank_environment())
        self._children = Children()
        config = json.dumps({"parent": os.getpid()}).encode()
        try:
            self._server.await_ready(limit_s)
            for name in names:
                fork = partial(self._server.fork, config)
                self.pids[name] = self._children.begin(name, fork)
        except BaseException:
            self.close()
            raise

    def ask(self, do: str, tasks: Mapping[str, Task], *, limit_s: float) -> dict[str, Answer]:
        """Have several places do one thing at once, and wait for their answers. A place that has
        not answered after ``limit_s`` seconds is killed, and answers nothing any more.
        """
        self._number += 1
        answers: dict[str, Answer] = {}
        for name, task in tasks.items():
            payload = {"number": self._number, "do": do, "task": asdict(task)}
            if name in self._ended or not self._children.send(
                name, Extra(topic=TOPIC, payload=payload)
            ):
                answers[name] = self._gone(name)
        until_s = time.monotonic() + limit_s
        while len(answers) < len(tasks) and time.monotonic() < until_s:
            for report in self._children.wait(min(POLL_S, until_s - time.monotonic())):
                if isinstance(report, MessageReceived):
                    answer = self._answer(report.message)
                    if answer is not None and report.process in tasks:
                        answers.setdefault(report.process, answer)
                elif isinstance(report, Exited):
                    self._ended[report.process] = f"its process ended with {report.how}"
                    if report.process in tasks:
                        answers.setdefault(report.process, self._gone(report.process))
        for name in tasks:
            if name not in answers:
                self._children.signal(name, SIGKILL)
                self._ended[name] = f"it did not answer within {limit_s:.1f} s"
                answers[name] = Answer(error=self._ended[name], kind="silent")
        return answers

    def close(self) -> list[str]:
        """Kill and reap all; returns the names of those that stay, such as one whose device or disk
        does not let go.
        """
        try:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._server.close()
        finally:  # a second Ctrl-C comes here too
            left = self._children.close()
        return [name for _, name in sorted(left.items())]

    def _gone(self, name: str) -> Answer:
        return Answer(error=self._ended.get(name, "its process reads nothing"), kind="ended")

    def _answer(self, message: object) -> Answer | None:
        """None: of an earlier order."""
        if not isinstance(message, Extra) or message.payload.get("number") != self._number:
            return None
        payload = message.payload
        if "error" in payload:
            return Answer(error=str(payload["error"]), kind=str(payload["type"]))
        return Answer(found=payload["found"])


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
