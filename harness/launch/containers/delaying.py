"""Delays packets of a kernel queue (NFQUEUE), in order: ``python -m
trainchaos.harness.launch.containers.delaying N``.

Started inside a node's network namespace if the kernel has no netem. Each line of standard input is
a new ``delay jitter`` in seconds; the process ends with its input, and the kernel then lets packets
pass. Prints ``ready`` once it is bound. Uses only the standard library, since a fault waits for it
to start.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import select
import socket
import struct
import sys
import time

NETLINK_NETFILTER = 12
_SUBSYSTEM, _PACKET, _CONFIG, _VERDICTS = 3 << 8, 0, 2, 3
_REQUEST, _ACK = 1, 4
_CFG_CMD, _CFG_PARAMS, _CFG_MAXLEN, _CFG_MASK, _CFG_FLAGS = 1, 2, 3, 4, 5
_BIND, _COPY_META = 1, 1
_FAIL_OPEN, _GSO = 1, 4
_HEADER, _VERDICT, _ACCEPT = 1, 2, 1
MOST_WAITING = 100_000  # packets; further ones pass at once
RECEIVE_BYTES = 16 << 20
BIND_LIMIT_S = 5.0


def main(number: int) -> None:
    """Serve queue ``number`` until standard input ends. Raises OSError."""
    sock = socket.socket(
        socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_NETFILTER
    )
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, 33, RECEIVE_BYTES)  # SO_RCVBUFFORCE
    sock.bind((0, 0))
    sock.settimeout(BIND_LIMIT_S)
    _configure(sock, number, _attribute(_CFG_CMD, struct.pack("!BBH", _BIND, 0, socket.AF_INET)))
    _configure(
        sock,
        number,
        _attribute(_CFG_PARAMS, struct.pack("!IB", 0, _COPY_META))
        + _attribute(_CFG_MAXLEN, struct.pack("!I", MOST_WAITING))
        + _attribute(_CFG_FLAGS, struct.pack("!I", _FAIL_OPEN | _GSO))
        + _attribute(_CFG_MASK, struct.pack("!I", _FAIL_OPEN | _GSO)),
    )
    sock.setblocking(False)
    print("ready", flush=True)
    with contextlib.suppress(OSError):
        os.nice(-5)  # if it ran late itself, delays would be too long
    _serve(sock, number)


def _serve(sock: socket.socket, number: int) -> None:
    waiting: collections.deque[tuple[float, int]] = collections.deque()
    delay_s = jitter_s = last_s = 0.0
    pending = b""
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready = select.select([sock.fileno(), 0], [], [], left_s)[0]
        if 0 in ready:
            data = os.read(0, 4096)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                delay_s, jitter_s = map(float, line.split())
        if sock.fileno() in ready:
            now = time.monotonic()
            for packet in _packets(sock):
                last_s = max(last_s, now + max(0.0, delay_s + random.uniform(-jitter_s, jitter_s)))
                waiting.append((last_s, packet))
        due = None
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            due = waiting.popleft()[1]
        if due is not None:  # and all packets before it
            _send(
                sock,
                _VERDICTS,
                number,
                _attribute(_VERDICT, struct.pack("!II", _ACCEPT, due)),
                _REQUEST,
            )


def _packets(sock: socket.socket) -> list[int]:
    """Numbers of the packets that have arrived."""
    found = []
    for _ in range(256):
        try:
            data = sock.recv(1 << 16)
        except BlockingIOError:
            break
        except OSError:  # too many at once for the buffer: the kernel lets them pass
            continue
        at = 0
        while at + 20 <= len(data):
            size, kind = struct.unpack_from("=IH", data, at)
            if kind == _SUBSYSTEM | _PACKET:
                found.append(_number(data, at + 20, at + size))
            at += (size + 3) & ~3
    return found


def _number(data: bytes, at: int, end: int) -> int:
    while at + 4 <= end:
        size, kind = struct.unpack_from("=HH", data, at)
        if kind & 0x7FFF == _HEADER:
            return int(struct.unpack_from("!I", data, at + 4)[0])
        at += (size + 3) & ~3
    raise ValueError("a packet without a number")


def _configure(sock: socket.socket, number: int, attributes: bytes) -> None:
    _send(sock, _CONFIG, number, attributes, _REQUEST | _ACK)
    code = struct.unpack_from("=i", sock.recv(4096), 16)[0]
    if code:
        raise OSError(-code, os.strerror(-code))


def _send(sock: socket.socket, kind: int, number: int, attributes: bytes, flags: int) -> None:
    body = struct.pack("!BBH", socket.AF_UNSPEC, 0, number) + attributes
    sock.send(struct.pack("=IHHII", 16 + len(body), _SUBSYSTEM | kind, flags, 0, 0) + body)


def _attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(data), kind) + data + bytes(-len(data) % 4)


if __name__ == "__main__":
    main(int(sys.argv[1]))
