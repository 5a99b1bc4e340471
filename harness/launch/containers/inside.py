"""Runs commands inside a node's network namespace from outside, even if the node is cut off.

If this process may (root), it enters the namespace with this machine's own tools, so the node needs
neither tools nor capabilities. Otherwise the engine runs them as root in the node's container,
which needs ``NET_ADMIN`` and the tools.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from trainchaos.harness.host.container_engine import asking

RUN_LIMIT_S = 10.0
TOOLS = ("tc", "nft", "ip")
NOT_THERE = (126, 127)  # exit codes of an engine that does not find the program
_FED = 'printf %s "$0" | "$@"'  # standard input for a command that the engine starts


class Inside(Protocol):
    """One life of one node: from a start to its end."""

    entered: bool
    """Whether this process enters the namespace itself, so that helpers of this machine can run
    there.
    """

    python: str
    """A Python there that has this package."""

    def run(self, argv: Sequence[str], text: str = "", *, limit_s: float = RUN_LIMIT_S) -> str:
        """Output of a command, with ``text`` as its input. Raises RuntimeError with its error
        message, or if it did not end in time.
        """

    def stay(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a helper there that ends when its standard input, held by us, closes. Raises
        RuntimeError.
        """

    def close(self) -> None:
        """Release it."""


class ByNamespace:
    """``pid``: of the node's first process; the caller must hold its pidfd. Raises RuntimeError."""

    entered = True
    python = sys.executable

    def __init__(self, pid: int) -> None:
        try:
            self._fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"the network namespace of process {pid} cannot be opened: {error.strerror}"
            ) from error

    def run(self, argv: Sequence[str], text: str = "", *, limit_s: float = RUN_LIMIT_S) -> str:
        try:
            ran = subprocess.run(
                self._command(argv),
                input=text.encode(),
                capture_output=True,
                timeout=limit_s,
                check=False,
                pass_fds=[self._fd],
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{argv[0]} did not run: {error}") from error
        return _answer(argv, ran.returncode, ran.stdout, ran.stderr)

    def stay(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        try:
            return subprocess.Popen(
                self._command(argv), stdin=pipe, stdout=pipe, pass_fds=[self._fd]
            )
        except OSError as error:
            raise RuntimeError(f"{argv[0]} did not start: {error}") from error

    def close(self) -> None:
        """Close the namespace: one that is held open outlives its container."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _command(self, argv: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net=/proc/self/fd/{self._fd}", *argv]


class ByEngine:
    """``container``: a docker-py container; ``python``: of its image."""

    entered = False

    def __init__(self, container: Any, python: str) -> None:
        self._container = container
        self.python = python

    def run(self, argv: Sequence[str], text: str = "", *, limit_s: float = RUN_LIMIT_S) -> str:
        """See ``Inside``. The engine's own limit bounds the wait."""
        fed = ["sh", "-c", _FED, text, *argv] if text else list(argv)
        with asking(f"run {argv[0]} in {self._container.name}"):
            code, (out, err) = self._container.exec_run(fed, user="0", demux=True)
        if code in NOT_THERE:
            raise RuntimeError(
                f"{argv[0]} is not in the image of {self._container.name}: it needs"
                f" {', '.join(TOOLS)}, or a harness that is root, which brings its own"
            )
        return _answer(argv, code, out or b"", err or b"")

    def stay(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Raises RuntimeError: nothing would end the helper together with this process."""
        raise RuntimeError(
            "it needs a helper in the node's network namespace, which only root of this machine may"
            " enter"
        )

    def close(self) -> None:
        """Nothing to release."""


def may_enter() -> bool:
    """Whether this process may enter other network namespaces: it is root and has the tools."""
    return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("nsenter", *TOOLS))


def lacks_tools() -> str | None:
    """Why packets between nodes cannot be shaped from here now; None if they can, or if the nodes
    may do it themselves.
    """
    if os.geteuid() != 0:
        return None  # then the nodes get NET_ADMIN and must have the tools
    missing = [tool for tool in ("nsenter", *TOOLS) if shutil.which(tool) is None]
    return (
        f"{', '.join(missing)} not installed here: apt-get install iproute2 nftables util-linux"
        if missing
        else None
    )


def _answer(argv: Sequence[str], code: int | None, out: bytes, err: bytes) -> str:
    if code:
        said = (err or out).decode(errors="replace").strip().splitlines() or ["no reason given"]
        raise RuntimeError(f"{argv[0]} refused ({' '.join(argv[:4])}): {said[0]}")
    with contextlib.suppress(UnicodeDecodeError):
        return out.decode()
    return ""
