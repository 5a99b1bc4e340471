"""Guards a command for the harness: starts it, adopts all its descendants, and kills them on
command or when the harness is gone.

Runs as a separate process (``python guard.py <control fd> <output fd> <program> ...``) with only
the standard library. It is a child subreaper: any orphan of the command, in any session, becomes
its child. It sends one JSON line each on the control socket: ``{"started": pid}`` or ``{"error":
text}``, ``{"ended": wait status}`` and ``{"left": n, "killed": n}``. It receives ``t`` (SIGTERM to
the command's process group) and ``k`` (kill everything at once); the end of the socket means ``k``.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

KILL_LIMIT_S = 5.0
REAP_EVERY_S = 0.2
SETTLE_S = 0.01
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


class CommandGuard:
    """One command and all its descendants."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._pid = 0

    def run(self, argv: list[str], output: int) -> None:
        """Start the command, then serve until everything is killed."""
        if not self._start(argv, output):
            return
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        pidfd = os.pidfd_open(self._pid)
        poll.register(pidfd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll(REAP_EVERY_S * 1000)}
            if pidfd in ready:
                poll.unregister(pidfd)
            self._reap()
            if self._control.fileno() in ready:
                orders = self._control.recv(64)
                if b"t" in orders:
                    self._terminate()
                if b"k" in orders or not orders:
                    self._kill_all()
                    return

    def _start(self, argv: list[str], output: int) -> bool:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        except (OSError, ValueError) as error:
            self._say({"error": getattr(error, "strerror", None) or str(error)})
            return False
        os.close(output)
        child.returncode = 0  # reaped here, with all other children
        self._pid = child.pid
        self._say({"started": child.pid})
        return True

    def _reap(self) -> None:
        for pid, status in reaped():
            if pid == self._pid:
                self._say({"ended": status})

    def _terminate(self) -> None:
        try:
            os.killpg(self._pid, signal.SIGTERM)
            os.killpg(self._pid, signal.SIGCONT)
        except ProcessLookupError:
            pass

    def _kill_all(self) -> None:
        """Kill until no process is left: a process may fork during the search."""
        deadline, killed = time.monotonic() + KILL_LIMIT_S, set()
        while time.monotonic() < deadline:
            self._reap()
            found = descendants()
            if not found:
                break
            for pid, started in found:
                if kill(pid, started):
                    killed.add((pid, started))
            time.sleep(SETTLE_S)
        self._reap()
        self._say({"left": len(descendants()), "killed": len(killed)})

    def _say(self, message: dict[str, object]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the harness is gone; the work to do is the same
            pass


def reaped() -> Iterator[tuple[int, int]]:
    """(pid, wait status) of each child that has ended; waits for none."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def stat(pid: int) -> tuple[str, int, int] | None:
    """State, parent and start time of a process, or None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rfind(")") + 2 :].split()
    return fields[0], int(fields[1]), int(fields[19])


def descendants() -> list[tuple[int, int]]:
    """(pid, start time) of all living descendants of this process."""
    rows = {
        int(name): row
        for name in os.listdir("/proc")
        if name.isdigit() and (row := stat(int(name)))
    }
    ours = {os.getpid()}
    grown = True
    while grown:
        more = {pid for pid, (_, parent, _) in rows.items() if parent in ours} - ours
        ours |= more
        grown = bool(more)
    return [(pid, rows[pid][2]) for pid in ours - {os.getpid()} if rows[pid][0] not in "ZX"]


def kill(pid: int, started: int) -> bool:
    """SIGKILL exactly that process; False if it is gone already."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        row = stat(pid)
        if row is None or row[2] != started:
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def main() -> None:
    """Arguments: control socket, output file, command."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    # handled, not ignored: an ignored signal would stay ignored in the command
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    CommandGuard(control).run(sys.argv[3:], int(sys.argv[2]))


if __name__ == "__main__":
    main()
