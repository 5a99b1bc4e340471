"""Starts nodes, and restarts lost ones, on separate threads: platforms may take long."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as LateError

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.launch.nodes.platform import Platform

# The survivors first recover undisturbed: a restarted node imports torch and may share their
# machine.
AGAIN_AFTER_S = 5.0
MAX_LIVES = 100  # of one node in one run
AT_ONCE = 32
LOOK_S = 0.2


class Renewal:
    """``begin`` makes the platform start a node; may take long, and raise InfrastructureError."""

    def __init__(self, platform: Platform, begin: Callable[[int], None], *, nodes: int) -> None:
        self._platform = platform
        self._begin = begin
        self._due_s: dict[int, float] = {}  # lost nodes, and when to restart them if they are gone
        self._lives: dict[int, int] = {}
        self._starting: dict[int, Future[None]] = {}
        self._starter = ThreadPoolExecutor(
            max_workers=min(nodes, AT_ONCE), thread_name_prefix="begin-node"
        )

    def start(self, node: int) -> None:
        """Start a node."""
        self._due_s.pop(node, None)
        self._lives[node] = self._lives.get(node, 0) + 1
        self._starting[node] = self._starter.submit(self._begin, node)

    def lost(self, node: int) -> None:
        """A node was lost; restart it soon if it is gone and the platform can replace it. It may
        also come back by itself.
        """
        self._due_s[node] = time.monotonic() + AGAIN_AFTER_S

    def back(self, node: int) -> None:
        """The node's agent is connected."""
        self._due_s.pop(node, None)

    def look(self, *, at_once: bool = False) -> None:
        """Start the nodes that are due; does not wait."""
        now_s = time.monotonic()
        for node, due_s in list(self._due_s.items()):
            idle = node not in self._starting or self._starting[node].done()
            may = idle and (at_once or due_s <= now_s) and self._lives[node] < MAX_LIVES
            if may and self._platform.gone(node) and self._platform.replaceable(node):
                self.start(node)

    def await_begun(
        self, node: int, *, limit_s: float, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Wait for a pending start of a node, or until ``stopped``. Raises InfrastructureError."""
        future = self._starting.get(node)
        until_s = time.monotonic() + limit_s
        while future is not None and not stopped():
            try:
                future.result(timeout=max(0.0, min(LOOK_S, until_s - time.monotonic())))
                return
            except LateError as error:
                if time.monotonic() < until_s:
                    continue
                raise InfrastructureError(
                    f"node {node} did not begin within {limit_s:.0f} s",
                    hint="see what the platform says of it",
                ) from error

    def close(self) -> None:
        """Start no more nodes, and wait for pending starts."""
        self._starter.shutdown(wait=True, cancel_futures=True)
