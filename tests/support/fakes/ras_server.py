"""Answers as NCCL's RAS does: its protocol, and documents of the form that it writes (NCCL's
src/ras/client_support.cc, 2.28).
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.support.running import LIMIT_S

OPERATIONS = (
    *("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"),
    *("SendRecv", "Send", "Recv", "AlltoAll", "Scatter", "Gather"),
)
HOST = "10.0.0.1"
FIRST_PID = 4240


def rank(number: int, count: int = 41, **changed: Any) -> dict[str, Any]:
    """A rank that has launched so many all-reduces. ``changed``: flags of its status, counts by
    operation, or ``pid``.
    """
    status = {
        "init_state": 0,
        "async_error": 0,
        "finalize_called": False,
        "destroy_flag": False,
        "abort_flag": False,
    }
    counts = {**dict.fromkeys(OPERATIONS, 0), "AllReduce": count}
    return {
        "rank": number,
        "host": HOST,
        "pid": changed.get("pid", FIRST_PID + number),
        "cuda_dev": number,
        "nvml_dev": number,
        "status": {name: changed.get(name, value) for name, value in status.items()},
        "collective_counts": {name: changed.get(name, value) for name, value in counts.items()},
    }


def missing(number: int, *, dead: bool = False, unresponsive: bool = True) -> dict[str, Any]:
    """A rank whose process did not answer."""
    return {
        "rank": number,
        "host": HOST,
        "pid": FIRST_PID + number,
        "cuda_dev": number,
        "nvml_dev": number,
        "status": {"unresponsive": unresponsive, "considered_dead": dead},
    }


def communicator(
    ranks: Sequence[dict[str, Any]], gone: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """A communicator of these ranks."""
    return {
        "hash": "0x27a079b828ff1a75",
        "secondary_hash": "0x1:0x2",
        "size": len(ranks) + len(gone),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(gone),
        "ranks": [*ranks],
        "missing_ranks": [*gone],
    }


def document(*communicators: dict[str, Any]) -> str:
    """The answer to VERBOSE STATUS."""
    found = {
        "nccl_version": "2.28.9",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-29 12:00:00",
        "communicators_count": len(communicators),
        "communicators": [*communicators],
        "ras": {"collection_time_sec": 0.002, "timeouts_count": 0},
    }
    return json.dumps(found, indent=2) + "\n"


class RasServer:
    """``answer``: to VERBOSE STATUS, or what makes it; ``knows``: False: of an NCCL that knows no
    JSON; ``mute``: so many connections are answered by nobody first, as where they land at a
    stopped process; ``first``: what is said to the first command, in place of the protocol's
    number.
    """

    def __init__(
        self,
        answer: str | Callable[[], str] = "",
        *,
        knows: bool = True,
        mute: int = 0,
        first: str = "",
    ) -> None:
        self._answer, self._knows, self._mute = answer, knows, mute
        self._first = first or "SERVER PROTOCOL 2\n"
        self._held: list[socket.socket] = []
        self.heard: list[list[str]] = []
        """The commands of each connection."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.heard.append([])
            self._held.append(connection)
            if len(self.heard) > self._mute:
                with contextlib.suppress(OSError):
                    self._talk(connection)
                connection.close()

    def _talk(self, connection: socket.socket) -> None:
        connection.settimeout(LIMIT_S)
        with connection.makefile() as lines:
            for line in lines:
                command = line.strip()
                self.heard[-1].append(command)
                if command == "VERBOSE STATUS":
                    said = self._answer if isinstance(self._answer, str) else self._answer()
                    connection.sendall(said.encode())
                    return
                connection.sendall(self._said(command).encode())

    def _said(self, command: str) -> str:
        if command.startswith("CLIENT PROTOCOL"):
            return self._first
        if command == "SET FORMAT json" and not self._knows:
            return "ERROR: Unknown command SET FORMAT json\n"
        return "OK\n"

    def close(self) -> None:
        """End it."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT_S)
        for connection in self._held:
            connection.close()


@contextlib.contextmanager
def ras_server(answer: str | Callable[[], str] = "", **how: Any) -> Iterator[RasServer]:
    """A server while it is needed; see RasServer."""
    server = RasServer(answer, **how)
    try:
        yield server
    finally:
        server.close()
