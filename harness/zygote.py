"""A process that has imported everything and forks ranks on request: a rank is there in milliseconds, not
seconds.

It is single-threaded, holds no training state, and never touches CUDA, so that forking it is safe. A rank is
forked twice: its parent ends at once, and the kernel hands it to the harness (a child subreaper), which can
then wait for it like for a child of its own.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from harness.rank import RankConfig

MAX_REQUEST = 1 << 18
ADOPTION_TIMEOUT_S = 5.0
WARM_MODULES = (
    "numpy.random", "torch", "torch._dynamo", "torch.distributed.checkpoint", "harness.rank_faults", "harness.training",
    "harness.workloads.gpt", "harness.workloads._transformer", "harness.workloads.mlp",
)  # fmt: skip


def serve(control: socket.socket) -> None:
    """Answer spawn requests (a RankConfig as JSON with two descriptors) with the new rank's pid, until
    the other side ends.
    """
    from harness.rank import RankConfig

    while True:
        request, fds, _, _ = socket.recv_fds(control, MAX_REQUEST, 2)
        if not request:
            return
        config = RankConfig.model_validate_json(request)
        pid = _fork_twice(control, config, fds[0], fds[1])
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


def _fork_twice(control: socket.socket, config: RankConfig, control_fd: int, mark_fd: int) -> int:
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        second = os.fork()
        if second == 0:
            _become_rank(control, config, control_fd, mark_fd, reader, writer)
        os.write(writer, str(second).encode())
        os._exit(0)
    os.close(writer)
    # Once the parent in between is reaped, the rank belongs to the harness.
    os.waitpid(first, 0)
    pid = int(os.read(reader, 32))
    os.close(reader)
    return pid


def _become_rank(
    control: socket.socket, config: RankConfig, control_fd: int, mark_fd: int, reader: int, writer: int
) -> NoReturn:
    from harness.rank import run

    try:
        os.setsid()
        control.close()
        os.close(writer)
        os.close(reader)
        _wait_for_parent(config.parent)
        run(config, control_fd, mark_fd)
    finally:
        os._exit(71)


def _wait_for_parent(parent: int) -> None:
    """Wait until the parent in between is gone, at most ADOPTION_TIMEOUT_S (``run`` then notices the wrong parent)."""
    deadline = time.monotonic() + ADOPTION_TIMEOUT_S
    while os.getppid() != parent and time.monotonic() < deadline:
        time.sleep(0.0005)


def main() -> None:
    """Import, say so, serve. The control socket's descriptor is the only argument."""
    from harness.rank import _die_with

    _die_with(os.getppid())
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in WARM_MODULES:
        importlib.import_module(module)
    import torch

    torch.set_num_threads(1)
    control.send(b"ready")
    serve(control)


if __name__ == "__main__":
    main()
