"""Accepts a keeper's connections, and gives each a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from trainchaos.recovery.transport.stream import MessageError

MAX_CONNECTIONS = 512  # of ranks of its node, and as many of other keepers
TURN_S = 0.1


class Acceptor:
    """Accepts from ``listener`` until it is stopped. ``serve``: handles one connection to its end,
    on a thread of its own; ``patient``: a connection above MAX_CONNECTIONS waits instead of being
    rejected; ``say``: called with errors.
    """

    def __init__(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket], None],
        *,
        patient: bool,
        say: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._serve = serve
        self._patient = patient
        self._say = say
        self._closed = False
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening; open connections continue."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def join(self, limit_s: float) -> None:
        """After ``stop``: wait for the thread that accepts, which holds its socket open until it
        has noticed.
        """
        self._thread.join(limit_s)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # closed
            if not self._slot():
                self._say(f"over {MAX_CONNECTIONS} connections: one is turned away")
                sock.close()
                continue
            threading.Thread(target=self._attend, args=(sock,), daemon=True).start()

    def _slot(self) -> bool:
        while not (free := self._slots.acquire(timeout=TURN_S if self._patient else 0)):
            if not self._patient or self._closed:
                break
        return free

    def _attend(self, sock: socket.socket) -> None:
        try:
            with sock:
                self._serve(sock)
        except (OSError, MessageError) as error:
            self._say(f"a connection ended: {type(error).__name__}: {error}")
        finally:
            self._slots.release()
