"""The key-value store as a separate process behind a proxy, restarted as soon as it ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.launch.links.client import LinkProxy
from trainchaos.recovery.policy.jobconfig import LOOPBACK
from trainchaos.recovery.process.host import Exited, MessageReceived
from trainchaos.recovery.process.local import Children, ask_store, start_store
from trainchaos.recovery.process.processes import die_with, redirect_output
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.wire import Extra

START_LIMIT_S = 10.0
REQUEST_LIMIT_S = 10.0
MAX_STORES = 100
_IN, _OUT = ("clients", "store"), ("store", "clients")

Fork = Callable[[bytes, Sequence[int]], int]


class StoreConfig(BaseModel):
    """The configuration of a store process, or of an uninvolved client that measures one.

    ``parent``: pid that must be its parent; ``host``: where the store listens; ``port``: the
    store's port, for the client.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    be: Literal["store", "store-client"] = "store"
    parent: int
    host: str = LOOPBACK
    port: int = 0


def be_store(config: StoreConfig, channel: Channel) -> NoReturn:
    """Run a store until the supervisor's side of ``channel`` closes, or measure one; never
    returns.
    """
    die_with(config.parent)
    redirect_output(Path(os.devnull))  # torch logs a lot when a store is killed
    code = 1
    if config.be == "store-client":
        round_trip_s = ask_store(config.port, host=config.host, timeout_s=REQUEST_LIMIT_S)
        channel.send(Extra(topic="asked", payload={"round_trip_s": round_trip_s}))
        os._exit(0)
    with contextlib.suppress(InfrastructureError):
        _store, port = start_store(config.host)
        channel.send(Extra(topic="store", payload={"port": port}))
        while channel.receive() is not None:
            pass
        code = 0
    os._exit(code)


class StoreKeeper:
    """Keeps one store alive; ranks find it at ``host`` and ``port``. Implements
    ``harness.launch.launcher.StoreControl``.

    The store is supervised through its pidfd; when it ends, ``look`` starts another, on another
    port, before it returns. Raises InfrastructureError.
    """

    def __init__(self, fork: Fork, host: str = LOOPBACK) -> None:
        self._fork = fork
        self._host = host
        self._children = Children()
        self._proxy = LinkProxy(host)
        self._count = 0
        self._numbers = itertools.count(1)
        self._ended: Mapping[str, Any] | None = None
        self._round_trip_s: float | None = None
        self._asked = False
        self.port = 0
        self._start()

    def look(self) -> None:
        """Start another store if this one has ended."""
        for report in self._children.wait(0):
            if isinstance(report, MessageReceived):
                self._round_trip_s = report.message.payload["round_trip_s"]
            elif isinstance(report, Exited) and report.process == self._name:
                reaped = {"reaped_signal": report.signal, "reaped_exit_code": report.exit_code}
                self._proxy.close_forward(self.port)
                self._start()
                self._ended = {"store": report.process, **reaped, "next_port": self.port}

    def signal(self, signum: int) -> None:
        self._ended = None
        self._children.signal(self._name, signum)

    def set_latency(self, seconds: float) -> None:
        self._proxy.shape([_IN], LinkShape(delay_s=seconds))
        self._round_trip_s, self._asked = None, False

    def ended(self) -> Mapping[str, Any] | None:
        """How the store that was signalled last ended, once it is reaped."""
        return self._ended

    def round_trip_s(self) -> float | None:
        """Round trip of a client in a separate process, which the first call starts; None until it
        has an answer.
        """
        if not self._asked:
            self._asked = True
            self._spawn(
                StoreConfig(be="store-client", parent=os.getpid(), host=self._host, port=self.port)
            )
        return self._round_trip_s

    def close(self) -> dict[int, str]:
        """End everything; returns what could not be removed, as ``Children.close``."""
        self._proxy.close()
        return self._children.close()

    @property
    def _name(self) -> str:
        return f"store{self._count}"

    def _spawn(self, config: StoreConfig) -> None:
        name = self._name if config.be == "store" else f"client{next(self._numbers)}"
        self._children.begin(name, lambda fds: self._fork(config.model_dump_json().encode(), fds))

    def _start(self) -> None:
        self._count += 1
        if self._count > MAX_STORES:
            raise InfrastructureError(f"{MAX_STORES} stores in a row ended")
        self._spawn(StoreConfig(parent=os.getpid(), host=self._host))
        deadline_s = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline_s:
            for report in self._children.wait(0.1):
                if isinstance(report, MessageReceived) and report.process == self._name:
                    self.port = self._proxy.forward(_IN, self._host, report.message.payload["port"])
                    return
                if isinstance(report, Exited) and report.process == self._name:
                    raise InfrastructureError(f"the store could not start: {report.how}")
        raise InfrastructureError(f"the store did not start within {START_LIMIT_S:.0f} s")
