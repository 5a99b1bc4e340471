"""A spare's part in being up to date: it listens for a rank that feeds it, and applies each step
that the ranks have applied, on a thread of its own, until it is promoted.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.spares import frames, replay
from trainchaos.recovery.spares.hostcopy import Landing
from trainchaos.recovery.spares.standing import SETTLE_SILENCE_S
from trainchaos.recovery.state.fingerprint import fingerprint, sampled_digest
from trainchaos.recovery.state.parts import local
from trainchaos.recovery.state.state import TrainState
from trainchaos.recovery.transport import stream
from trainchaos.recovery.transport.auth import admit
from trainchaos.recovery.transport.stream import MessageError

LOOK_S = 0.05  # between looks whether the spare is promoted, while nothing comes
SILENCE_S = 60.0
"""In the midst of a frame, as for its feeder."""
END_S = 5.0  # within which the thread ends, once its connection is closed

_BAD = (MessageError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


class Follower:
    """Keeps ``state`` up to date. ``write``: logs an event of this process; ``changed``: called
    before the state becomes another than the initial one.

    ``step``: the step whose whole state this process holds, checked when it began to follow; -1:
    none.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        host: str,
        write: Callable[..., None],
        changed: Callable[[], None],
    ) -> None:
        self._state = state
        self._write, self._changed = write, changed
        self._synced = self._torn = False
        self._refuses = False  # until it has got the whole state
        self._arrived_s = 0.0
        self._connection: socket.socket | None = None
        self._room: dict[str, Tensor] = {}
        self._landing = Landing()
        self._given: tuple[int, dict[str, Tensor]] = -1, {}
        self._ending = threading.Event()
        self._news = threading.Condition()
        self._token = secrets.token_bytes(16)
        self._listening = socket.create_server((host, 0), backlog=4)
        self.address = frames.address_of(self._listening, self._token)
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()

    @property
    def step(self) -> int:
        """See the class."""
        return self._state.step if self._synced and not self._torn else -1

    def settle(self, step: int, check: Callable[[], None]) -> None:
        """``drain``, and follow no more."""
        self.drain(step, check)
        self.close()

    def drain(self, step: int | None, check: Callable[[], None]) -> None:
        """Follow up to ``step`` (None: the last), as long as what leads there arrives. ``check``
        raises what ends the wait.
        """
        self._arrived_s = time.monotonic()
        with self._news:
            while self._connection is not None and not self._refuses:
                check()
                there = step is not None and self.step >= step
                if there or time.monotonic() > self._arrived_s + SETTLE_SILENCE_S:
                    break
                self._news.wait(LOOK_S)

    def close(self) -> None:
        """Stop following, and wait until the state is left alone."""
        self._ending.set()
        for sock in (self._connection, self._listening):  # wakes the thread where it waits
            if sock is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(END_S)
        if self._thread.is_alive():  # it is in the midst of a step: the state cannot be used
            raise RuntimeError("a spare could not stop following within its bound")
        self._listening.close()

    # ---- on its own thread

    def _run(self) -> None:
        for device in {tensor.device for tensor in self._state.trained.values() if tensor.is_cuda}:
            torch.cuda.set_device(device)  # each thread has its own
        while not self._ending.is_set():
            if not frames.readable(self._listening, within_s=LOOK_S):
                continue
            try:
                sock, _ = self._listening.accept()
            except OSError:  # shut down by ``close``, or given up by who had connected
                continue
            with sock:
                self._connection = sock
                with suppress(OSError, *_BAD):
                    admit(sock, self._token, purpose=frames.PURPOSE, version=frames.VERSION)
                    self._follow(sock)
            with self._news:
                self._connection = None
                self._news.notify_all()

    def _follow(self, sock: socket.socket) -> None:
        sock.settimeout(SILENCE_S)
        self._refuses = self._torn
        frames.send(sock, {"kind": "here", "step": -1 if self._torn else self._state.step})
        while not self._ending.is_set():
            found = frames.readable(sock, self._listening, within_s=LOOK_S)
            if sock in found:
                self._take(sock, frames.receive(sock, self._arrived))
                with self._news:
                    self._news.notify_all()
            elif found:
                return  # another rank feeds from now on

    def _arrived(self) -> None:
        self._arrived_s = time.monotonic()

    def _take(self, sock: socket.socket, header: dict[str, Any]) -> None:
        match header["kind"]:
            case "base":
                self._compare(sock, header, sampled_digest, "equal")
            case "digest":
                self._compare(sock, header, fingerprint, "")
            case "gradients":
                self._gradients(sock, header)
            case "step":
                self._step(sock, header)
            case "state":
                self._copy(sock, header)
            case "dropped":
                self._synced, self._refuses = False, True
            case other:
                raise MessageError(f"a frame of an unknown kind {other[:20]!r}")

    def _compare(
        self,
        sock: socket.socket,
        header: dict[str, Any],
        digest: Callable[[TrainState], str],
        how: str,
    ) -> None:
        """Compare this state with the feeder's, of the same step."""
        if self._refuses or (not how and self._state.step != header["step"]):
            return
        if self._state.step == header["step"] and digest(self._state) == header["digest"]:
            if how and not self._synced:
                self._synced = True
                self._say(how, 0, 0.0)
            return
        self._reject(sock)

    def _reject(self, sock: socket.socket) -> None:
        """This state does not lead to the feeder's: say so."""
        self._synced, self._refuses = False, True
        frames.send(sock, {"kind": "differs"})

    def _gradients(self, sock: socket.socket, header: dict[str, Any]) -> None:
        """Receive the gradients of a step, which may not be applied yet."""
        names, trained = header["names"], self._state.trained
        parts = []
        for place, held in enumerate(names):
            numel = sum(local(trained[name]).numel() for name in held)
            part = self._room_for(f"{place}", numel, trained[held[0]])
            self._fill(sock, part, header["sizes"][place])
            parts.append(part)
        self._given = header["step"], replay.gradients_of(self._state, names, parts, header["none"])

    def _step(self, sock: socket.socket, header: dict[str, Any]) -> None:
        """A step is applied on the ranks: apply it here, with the gradients that came with it or
        before it.
        """
        state, sizes = self._state, header["sizes"]
        if "names" in header:
            self._gradients(sock, header)
            sizes = sizes[len(header["names"]) :]
        besides = state.besides()
        if list(besides) != header["besides"]:
            raise MessageError("the state has other tensors than here")
        rest = []
        for size, tensor in zip(sizes, besides.values(), strict=True):
            if size != tensor.nbytes:
                raise MessageError("a tensor of another size")
            data = memoryview(bytearray(size))
            stream.fill(sock, data, progress=self._arrived)
            rest.append(data)
        if self._refuses or self._torn or header["step"] <= state.step:
            return
        of, gradients = self._given
        if not of == header["step"] == state.step + 1:  # something is missing
            self._reject(sock)
            return
        self._changed()
        self._torn = True
        if "before" in header:
            state.load_scalars(header["before"])
        replay.apply(state, gradients, header["step"], header["loss"])
        for tensor, data in zip(state.besides().values(), rest, strict=True):
            replay.put(tensor, data)
        state.load_scalars(header["scalars"])
        self._torn = False

    def _copy(self, sock: socket.socket, header: dict[str, Any]) -> None:
        state, started = self._state, time.monotonic()
        slots = state.planned(header["scalars"])
        tensors = {name: local(tensor) for name, tensor in state.tensors(slots).items()}
        if sorted(tensors) != sorted(header["tensors"]):
            raise MessageError("the tensors of the state are others")
        self._changed()
        self._synced, self._torn = False, True
        for size, name in zip(header["sizes"], header["tensors"], strict=True):
            self._fill(sock, tensors[name], size)
        state.load_scalars(header["scalars"], slots)
        self._torn = self._refuses = False
        self._synced = True
        self._say("copy", sum(header["sizes"]), time.monotonic() - started)

    def _room_for(self, name: str, numel: int, like: Tensor) -> Tensor:
        """Memory to receive gradients into, the same for each step."""
        room = self._room.get(name)
        if room is None or room.numel() != numel or room.dtype != like.dtype:
            room = self._room[name] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return room

    def _fill(self, sock: socket.socket, tensor: Tensor, size: int) -> None:
        if size != tensor.nbytes:
            raise MessageError("a tensor of another size")
        stream.fill(sock, self._landing.of(tensor), progress=self._arrived)
        self._landing.landed(tensor)

    def _say(self, how: str, size: int, seconds: float) -> None:
        self._write(
            Kind.SPARE_SYNCED,
            step=self._state.step,
            how=how,
            bytes=size,
            seconds=round(seconds, 6),
        )
