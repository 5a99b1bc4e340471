"""Makes connections without reverse DNS look-ups.

Torch's store looks up the name of every address that it connects to (``getnameinfo``, for its log
messages), and no hosts file names ``::ffff:127.0.0.1``. A name server answers within a millisecond
that the name does not exist; one that is out of reach costs 5 s for each try, and an outage of the
network is when ranks connect anew (a hot spare's recovery with a name server that never answers:
10.2 s instead of 0.14 s).

glibc keeps the list of name servers separately for each thread (``_res``, see resolver(3)), so a
thread that only connects can use a server that knows no names, without affecting other threads.
With another libc, or where ``/etc/nsswitch.conf`` uses systemd's resolver, names are looked up as
before.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from trainchaos.recovery.policy.jobconfig import LOOPBACK

_LARGEST_QUERY = 4096  # bytes; longer ones go over TCP
# of a message (RFC 1035): number, flags, how many of four kinds of records
_HEADER = struct.Struct(">6H")
_NO_SUCH_NAME = 0x8183  # the flags of an answer: recursion asked for and offered, NXDOMAIN
_SERVER = struct.Struct("=H2s4s8x")  # a sockaddr_in

Made = TypeVar("Made")


class _Resolver(ctypes.Structure):
    """What ``struct __res_state`` of <resolv.h> begins with: the same on all platforms of glibc."""

    _fields_ = (
        ("retrans_s", ctypes.c_int),
        ("tries", ctypes.c_int),
        ("options", ctypes.c_ulong),
        ("servers", ctypes.c_int),
        ("server", ctypes.c_char * _SERVER.size),
    )


def nameless(make: Callable[[], Made]) -> Made:
    """Run ``make`` on a thread for which no address has a name, and return or raise what it
    does.
    """
    # in a list, which is emptied: the thread may hold the future for a moment longer than the
    # caller holds what was made, and a store that is let go of has to end
    made: Future[list[Made]] = Future()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((LOOPBACK, 0))
        at = server.getsockname()

        def run() -> None:
            try:
                _ask(at)
                made.set_result([make()])
            except BaseException as error:
                made.set_exception(error)
            finally:
                # By the same socket, which needs no descriptor: there may be none left. It may be
                # closed already.
                with contextlib.suppress(OSError):
                    server.sendto(b"", at)

        threading.Thread(target=run, name="connect", daemon=True).start()
        # shut down with all sockets of a group that is broken off
        with contextlib.suppress(BrokenPipeError):
            _serve(server)
    return made.result().pop()


def _serve(server: socket.socket) -> None:
    """Answer until no more questions can come."""
    while True:
        query, asker = server.recvfrom(_LARGEST_QUERY)
        if len(query) < _HEADER.size:
            return
        server.sendto(_answer(query), asker)


def _answer(query: bytes) -> bytes:
    number, _flags, questions, *_others = _HEADER.unpack_from(query)
    return _HEADER.pack(number, _NO_SUCH_NAME, questions, 0, 0, 0) + query[_HEADER.size :]


def _ask(server: tuple[str, int]) -> None:
    """Send this thread's look-ups to one name server only."""
    libc = ctypes.CDLL(None)
    state_of, initialise = getattr(libc, "__res_state", None), getattr(libc, "__res_ninit", None)
    if state_of is None or initialise is None:
        return
    state_of.restype = ctypes.POINTER(_Resolver)
    state = state_of()
    if initialise(state) != 0:
        return
    state.contents.retrans_s = state.contents.tries = state.contents.servers = 1
    host, port = server
    address = _SERVER.pack(socket.AF_INET, struct.pack(">H", port), socket.inet_aton(host))
    ctypes.memmove(
        ctypes.addressof(state.contents) + _Resolver.server.offset, address, len(address)
    )
