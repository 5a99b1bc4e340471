"""Reports training progress to a chaos run, and lets it inject faults at named places of a step.
Does nothing outside a run.

    from trainchaos import beacon

    if beacon.point("gradient", step) == "nan":
        ...  # fill this rank's gradients with NaN, then say so: beacon.did("nan", step, after=...)
    beacon.step(step, loss=loss.item(), samples=len(batch))
    with beacon.busy("evaluation"):
        evaluate(model)

Standard library only; the file may also be copied beside a script whose environment lacks this
package. Outside a run, a call costs one environment look-up. In a run, ``step`` appends one short
line to a file in a single write: it never blocks on the harness, never raises, and takes a few
microseconds. ``point`` holds only where a fault is planned.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from functools import lru_cache

VARIABLE = "CHAOS_BEACON"
"""Environment variable that names the file to append to; set by the harness."""
VERSION = 1
POINTS = "CHAOS_POINTS"
"""Environment variable that names the file in which the harness lists the points where a process
must hold.
"""
HANG_LIMIT_S = 600.0
"""Longest hang of any fault."""
HOLD_LIMIT_S = 30.0
"""Longest hold for a harness that does not answer; after that, the process never holds for this
harness again.
"""
SAID = "injected by chaos: "
"""Prefix of the message of an exception that a fault raises here."""
EVERY_STEP = 0
"""In the file of points: every step."""
_ARMED = b"1"
_SPEAK_LIMIT_S = 1.0
_ANSWER_LIMIT = 1024
_ROUNDS = 50_000  # takes some hundredths of a second


def step(
    step: int, *, loss: float | None = None, samples: int | None = None, rank: int | None = None
) -> None:
    """Say that training step ``step`` is done.

    ``loss``: of the step; a tensor works too, but ``float()`` is called on it, which may
    synchronize with the device. ``samples``: number this process used in the step. ``rank``: of
    this process in the whole job; by default the environment or ``torch.distributed`` is asked. All
    ranks may call it, or only one: a step counts as done at the first report.
    """
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    try:
        pid = os.getpid()
        fd, who = _open(path, pid), f" {pid} {_rank(rank)}"
        what = f" {int(step)} {_number(loss)} {'-' if samples is None else int(samples)}\n"
        os.write(fd, f"{VERSION} {time.monotonic_ns()}{who}{what}".encode())
    except Exception:  # a report must never harm the training it reports on
        return


def _number(loss: float | None) -> str:
    """The loss as text: a dash if none was given, ``?`` if it is not a number; the step is reported
    in any case.
    """
    try:
        return "-" if loss is None else repr(float(loss))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return "?"


class _Busy:
    """Context manager returned by ``busy``."""

    def __init__(self, rank: int | None) -> None:
        self._of = rank

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        _say_busy("-", 0.0, self._of)


def busy(what: str, *, limit_s: float = 3600.0, rank: int | None = None) -> _Busy:
    """Say that this process does something other than training, such as an evaluation, for at most
    ``limit_s`` seconds. A lack of steps during that time does not count as a hang. ``rank``: as in
    ``step``.

    Use it as ``with beacon.busy("evaluation"):``, or call it before; then it applies until the
    process's next ``step``.
    """
    _say_busy(what, limit_s, rank)
    return _Busy(rank)


def _say_busy(what: str, limit_s: float, rank: int | None) -> None:
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    try:
        pid = os.getpid()
        word = "".join(c if c.isascii() and c.isalnum() else "-" for c in what)[:40] or "-"
        who = f"{pid} {_rank(rank)}"
        line = f"{VERSION} {time.monotonic_ns()} {who} busy {float(limit_s)!r} {word}\n"
        os.write(_open(path, pid), line.encode())
    except Exception:  # as in step()
        return


def point(name: str, step: int) -> str | None:
    """Say that training step ``step``, counted from 1, is at the place ``name``, and hold there if
    a fault is planned.

    ``name``: ``data``, ``forward``, ``backward``, ``gradient`` (gradients are computed but not yet
    reduced), ``optimizer`` or ``saving`` (while writing the checkpoint of ``step``). Returns None
    to continue, or ``"nan"``: fill this rank's gradients with NaN, and call ``did``. The process
    may be killed or stopped while it holds, or hang here as long as a fault says. Raises only
    RuntimeError, where an exception is planned.
    """
    path = os.environ.get(POINTS)
    if path is None:
        return None
    points = _points(path)
    try:
        if points is None or not points.armed(int(step), name):
            return None
        answer = points.ask(int(step), name)
    except (OSError, TypeError, ValueError, OverflowError):
        return None
    if answer.startswith("raise "):
        points.say(f"did {int(step)} raise - -")
        raise RuntimeError(SAID + answer.removeprefix("raise "))
    if answer.startswith("hang "):
        points.say(f"did {int(step)} hang {threading.get_native_id()} -")
        _hang_as_answered(answer)
    return answer if answer == "nan" else None


def did(what: str, step: int, *, before: float | None = None, after: float | None = None) -> None:
    """Confirm that the action requested by ``point`` in step ``step`` was done; never raises.

    ``what``: ``"nan"``. ``before``, ``after``: a value computed from the gradients, such as their
    sum, that shows the change.
    """
    path = os.environ.get(POINTS)
    points = _points(path) if path is not None else None
    if points is None:
        return
    try:
        values = " ".join("-" if value is None else repr(float(value)) for value in (before, after))
        points.say(f"did {int(step)} {what} {values}")
    except Exception:  # as in step()
        return


def hang(how: str, seconds: float) -> str:
    """Block this thread for ``seconds`` (at most HANG_LIMIT_S), whatever else happens; returns the
    mechanism used.

    ``how``: ``sleep`` waits in a lock that is never released; ``spin`` loops in Python code;
    ``kernel`` imitates waiting for a GPU kernel, in C code that uses a processor with the GIL
    released. Raises ValueError for anything else.
    """
    deadline = time.monotonic() + min(seconds, HANG_LIMIT_S)
    if how == "sleep":
        never = threading.Lock()
        never.acquire(timeout=1.0)
        never.acquire(timeout=max(0.0, deadline - time.monotonic()))
        return "asleep in a lock"
    if how == "spin":
        while time.monotonic() < deadline:
            pass
        return "an endless loop"
    if how == "kernel":
        import hashlib

        while time.monotonic() < deadline:
            hashlib.pbkdf2_hmac(
                "sha256", b"no kernel of a GPU is run", b"but a processor is busy", _ROUNDS
            )
        return "emulated: a busy wait in C, with the interpreter's lock released"
    raise ValueError(f"unknown kind of hang: {how}")


def _hang_as_answered(answer: str) -> None:
    """Hang as the harness's answer says; an answer of another version is ignored."""
    try:
        _, how, seconds = answer.split(" ")
        hang(how, float(seconds))
    except ValueError:
        return


class _Points:
    """One arm's points as written by the harness, and this process's connection to the harness.
    Forked children stay silent.

    The file: ``1 <socket>``, then a line for each point, ``<1 armed, 0 not> <step> <name>``; only
    the first character of a line ever changes.
    """

    def __init__(self, path: str) -> None:
        self._pid = os.getpid()
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        head, *rows = os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode("ascii").splitlines()
        version, self._address = head.split(" ")
        self._places: dict[tuple[int, str], int] = {}
        self._of_any_step: dict[str, int] = {}
        offset = len(head) + 1
        for row in rows:
            _, number, name = row.split(" ")
            self._places[int(number), name] = offset
            if int(number) == EVERY_STEP:
                self._of_any_step[name] = offset
            offset += len(row) + 1
        self._one = threading.Lock()  # a checkpoint may be saved on a separate thread
        self._socket: socket.socket | None = None
        self._asked = 0
        self._gone = version != str(VERSION)

    def armed(self, step: int, name: str) -> bool:
        """Whether a rank must hold at this point."""
        places = (self._places.get((step, name)), self._of_any_step.get(name))
        return any(at is not None and os.pread(self._fd, 1, at) == _ARMED for at in places)

    def ask(self, step: int, name: str) -> str:
        """Hold until the harness has acted or answered; returns ``go`` without an answer. Raises
        OSError.
        """
        if os.getpid() != self._pid:
            return "go"
        with self._one:
            if self._gone or not self._connect():
                return "go"
            self._asked += 1
            answer = ""
            try:
                self._send(f"at {self._asked} {step} {name}")
                answer = self._answer()
            finally:
                if not answer:  # a late answer must not be read as the next one
                    self._drop()
        return answer or "go"

    def say(self, line: str) -> None:
        """Send a line to the harness, if connected."""
        if os.getpid() != self._pid:
            return
        with self._one:
            try:
                if self._socket is not None:
                    self._send(line)
            except OSError:
                self._drop()

    def _connect(self) -> bool:
        if self._socket is None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                made.settimeout(_SPEAK_LIMIT_S)
                made.connect("\0" + self._address)
            except OSError:
                made.close()
                self._gone = True
                return False
            self._socket = made
        return True

    def _send(self, line: str) -> None:
        assert self._socket is not None
        self._socket.settimeout(_SPEAK_LIMIT_S)
        self._socket.sendall(line.encode("ascii") + b"\n")

    def _answer(self) -> str:
        assert self._socket is not None
        deadline, data = time.monotonic() + HOLD_LIMIT_S, b""
        self._socket.settimeout(HOLD_LIMIT_S)
        while len(data) < _ANSWER_LIMIT:
            try:
                more = self._socket.recv(_ANSWER_LIMIT)
            except TimeoutError:
                more = b""
            data += more
            if data.endswith(b"\n"):
                number, _, answer = data.decode("ascii", "replace").rstrip("\n").partition(" ")
                return answer if number == str(self._asked) else ""
            if not more:
                self._gone = self._gone or time.monotonic() >= deadline
                return ""
        return ""

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


_LOADED: dict[str, _Points | None] = {}


def _points(path: str) -> _Points | None:
    """The points file, read once; None if it is invalid."""
    if path not in _LOADED:
        try:
            _LOADED[path] = _Points(path)
        except (OSError, ValueError):
            _LOADED[path] = None
    return _LOADED[path]


def _rank(given: int | None) -> str:
    """This process's rank as text, a dash if nothing says it.

    Asked for each time: a job that continues with fewer ranks may renumber them. The environment
    comes first; ``torch.distributed`` is asked where it is loaded already, for ranks that only
    their process group knows (``torch.multiprocessing.spawn``); a local rank is the last guess.
    """
    names = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    rank = (
        str(int(given))
        if given is not None
        else next((v for n in names if (v := os.environ.get(n))), "")
        or _rank_in_group()
        or os.environ.get("LOCAL_RANK", "")
    )
    return rank if rank.isdigit() else "-"


def _rank_in_group() -> str:
    """The rank in torch's default process group; empty without one. Never imports torch."""
    distributed = sys.modules.get("torch.distributed")
    try:
        if distributed is not None and distributed.is_initialized():
            return str(distributed.get_rank())
    except (AttributeError, RuntimeError, ValueError):  # half imported, or built without it
        return ""
    return ""


@lru_cache(maxsize=4)
def _open(path: str, pid: int) -> int:
    """The open file, cached per process, including forked ones."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK)
