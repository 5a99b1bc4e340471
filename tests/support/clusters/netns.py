"""Two sites of a real network, each a network namespace, joined by a control link and a data link
that can be cut.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.support.running import LIMIT_S

CLONE_NEWNET = 0x40000000
REQUIRED = "netns" in os.environ.get("CHAOS_REQUIRE", "").split(",")
CONTROL, DATA = "control", "data"
_NETS = {CONTROL: "10.77.0", DATA: "10.77.1"}


def why_not() -> str:
    """What is missing for network namespaces here; empty: nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need ip (the package iproute2)"
    name = f"probe-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if made.returncode != 0:
        return f"this kernel makes no network namespace: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def require() -> None:
    """Skip with the reason; where CHAOS_REQUIRE names netns, fail."""
    if reason := why_not():
        if REQUIRED:
            pytest.fail(f"CHAOS_REQUIRE names netns: {reason}")
        pytest.skip(reason)


class Sites:
    """Site 0 is where the coordinator is. ``address`` of a site on a link; ``at``: what starts a
    command there.
    """

    def __init__(self, name: str) -> None:
        self._names = [f"{name}-{os.getpid()}-{site}" for site in range(2)]
        try:
            for space in self._names:
                _ip("netns", "add", space)
                _ip("-n", space, "link", "set", "lo", "up")
            for link, net in _NETS.items():
                one, other = self._names
                _ip(
                    "link",
                    "add",
                    link,
                    "netns",
                    one,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    link,
                    "netns",
                    other,
                )
                for site, space in enumerate(self._names):
                    _ip("-n", space, "address", "add", f"{net}.{site + 1}/24", "dev", link)
                    _ip("-n", space, "link", "set", link, "up")
        except BaseException:
            self.close()
            raise

    def address(self, site: int, link: str) -> str:
        """Numeric."""
        return f"{_NETS[link]}.{site + 1}"

    def at(self, site: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command there; the process is that of the command."""
        return ["ip", "netns", "exec", self._names[site], *command]

    def cut(self, link: str) -> None:
        """Nothing passes in either direction, and nobody is told."""
        for site, space in enumerate(self._names):
            other = self.address(1 - site, link)
            _ip(
                "-n",
                space,
                "neighbour",
                "replace",
                other,
                "lladdr",
                "02:00:00:00:00:99",
                "dev",
                link,
                "nud",
                "permanent",
            )

    def heal(self, link: str) -> None:
        """As it was."""
        for site, space in enumerate(self._names):
            _ip("-n", space, "neighbour", "del", self.address(1 - site, link), "dev", link)

    @contextmanager
    def inside(self, site: int) -> Iterator[None]:
        """The block is at a site: its sockets, those of threads that it starts, and processes."""
        with (
            open("/proc/thread-self/ns/net") as before,
            open(f"/run/netns/{self._names[site]}") as there,
        ):
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def close(self) -> None:
        """Remove everything; processes inside have ended."""
        for space in self._names:
            subprocess.run(
                ["ip", "netns", "del", space], capture_output=True, timeout=LIMIT_S, check=False
            )


def _enter(fd: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=LIMIT_S)
