"""A process that has imported everything and forks ranks on request: a rank starts in milliseconds,
not seconds.

``ForkServer`` is the supervisor's side. The other side is ``python -m
trainchaos.recovery.process.forkserver FD ENTRY MODULE ...``: it is single-threaded, holds no
training state, and never touches CUDA, so that forking it is safe. A rank is forked twice: its
parent ends at once, and the kernel hands it to the supervisor (a child subreaper), which can then
wait for it as for a child of its own.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.recovery.process.processes import die_with

START_LIMIT_S = 120.0
REAP_LIMIT_S = 10.0
WAITING_MS = 50
ADOPTION_TIMEOUT_S = 5.0
MAX_REQUEST = 1 << 18

Entry = Callable[[bytes, int, int], NoReturn]
"""Runs in a forked process: gets its configuration, and the descriptors of control socket and
mark.
"""


class ForkServer:
    """Starts the server at once without waiting for it; it imports while other work goes on.

    ``entry``: ``module:function``, an ``Entry``; ``modules``: imported once, before any fork;
    ``environment``: of the server and of all its forks. The caller must be a child subreaper.
    Raises InfrastructureError.
    """

    def __init__(self, entry: str, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._modules = modules
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "trainchaos.recovery.process.forkserver",
                    str(theirs.fileno()),
                    entry,
                    *modules,
                ],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise InfrastructureError(
                f"cannot start Python: {error.strerror}", hint="free memory or processes"
            ) from error
        finally:
            theirs.close()
        ours.settimeout(START_LIMIT_S)
        self._control = ours
        self._ready = False

    def await_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until everything is imported, at most ``limit_s`` seconds. Raises
        InfrastructureError when it does not.
        """
        if not self._ready:
            why = "the process that pre-imports torch did not start"
            self._control.settimeout(limit_s)
            try:
                self._ready = self._control.recv(16) == b"ready"
            except TimeoutError:
                why = f"torch was not imported within {limit_s:.0f} s"
            except OSError:
                pass
            self._control.settimeout(START_LIMIT_S)
            if not self._ready:
                raise InfrastructureError(
                    why, hint=f"try: {sys.executable} -c 'import {', '.join(self._modules)}'"
                )

    def fork(
        self, config: bytes, fds: Sequence[int], waiting: Callable[[], None] | None = None
    ) -> int:
        """Fork a rank with its control and mark descriptor; returns its pid, a child of this
        process. ``waiting``: called every WAITING_MS until the fork is done, which takes seconds on
        a busy machine.

        Raises InfrastructureError.
        """
        self.await_ready()
        try:
            socket.send_fds(self._control, [config], list(fds))
            until_s, poll = time.monotonic() + START_LIMIT_S, select.poll()
            poll.register(self._control, select.POLLIN)
            while waiting is not None and time.monotonic() < until_s and not poll.poll(WAITING_MS):
                waiting()
            return int(self._control.recv(32))
        except (OSError, ValueError) as error:
            raise InfrastructureError(
                f"the zygote is gone: {error}", hint="see the messages above"
            ) from error

    def close(self) -> None:
        """End the server at once; it holds no state."""
        self._control.close()
        self.process.kill()
        self.process.wait(timeout=REAP_LIMIT_S)


@dataclass(frozen=True, kw_only=True)
class LaunchRecipe:
    """How processes of a node are started. ``entry``: ``module:function`` of warm ones
    (``Entry``); ``cold``: the module that a cold one runs; ``modules``:
    imported before anything is forked; ``environment``: of all of them.
    """

    entry: str
    cold: str
    modules: Sequence[str]
    environment: Mapping[str, str]

    def server(self) -> ForkServer:
        """Start the fork server, which begins to import. The caller must be a child subreaper.
        Raises InfrastructureError.
        """
        return ForkServer(self.entry, self.modules, self.environment)


def start_cold(
    module: str, config: bytes, fds: Sequence[int], environment: Mapping[str, str]
) -> int:
    """Start ``python -m module CONTROL MARK CONFIG`` (descriptors, the last to read ``config``
    from); returns its pid.

    Reap it through its pidfd. Raises InfrastructureError.
    """
    reader, writer = os.pipe()
    os.write(writer, config)
    os.close(writer)
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, fds), str(reader)],
            pass_fds=[*fds, reader],
            start_new_session=True,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise InfrastructureError(
            f"cannot start a rank: {error.strerror}", hint="free memory or processes"
        ) from error
    finally:
        os.close(reader)
    child.returncode = 0  # Popen must not wait for it a second time
    return child.pid


# ---- the server's side


def serve(control: socket.socket, entry: Entry, parent: int) -> None:
    """Answer requests (a configuration with two descriptors) with the new process's pid, until the
    other side ends.
    """
    while True:
        request, fds, _, _ = socket.recv_fds(control, MAX_REQUEST, 2)
        if not request:
            return
        pid = _fork_twice(control, entry, request, fds, parent)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


def _fork_twice(
    control: socket.socket, entry: Entry, request: bytes, fds: list[int], parent: int
) -> int:
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        second = os.fork()
        if second == 0:
            try:
                os.setsid()
                control.close()
                os.close(writer)
                os.close(reader)
                _wait_for_parent(parent)
                entry(request, fds[0], fds[1])
            finally:
                os._exit(71)
        os.write(writer, str(second).encode())
        os._exit(0)
    os.close(writer)
    # Once the parent in between is reaped, the new process belongs to the supervisor.
    os.waitpid(first, 0)
    pid = int(os.read(reader, 32))
    os.close(reader)
    return pid


def _wait_for_parent(parent: int) -> None:
    """Wait until the intermediate parent has exited, at most ADOPTION_TIMEOUT_S (``die_with``
    notices then).
    """
    deadline = time.monotonic() + ADOPTION_TIMEOUT_S
    while os.getppid() != parent and time.monotonic() < deadline:
        time.sleep(0.0005)


def main() -> None:
    """Import the modules, report it, serve. Arguments: the control socket's descriptor, the entry,
    the modules.
    """
    parent = os.getppid()
    die_with(parent)
    control = socket.socket(fileno=int(sys.argv[1]))
    module, function = sys.argv[2].split(":")
    for name in sys.argv[3:]:
        importlib.import_module(name)
    entry: Entry = getattr(importlib.import_module(module), function)
    # Freeze existing objects: a rank need not scan them for garbage, nor copy their pages for that.
    gc.collect()
    gc.freeze()
    control.send(b"ready")
    serve(control, entry, parent)


if __name__ == "__main__":
    main()
