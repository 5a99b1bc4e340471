"""What a shaped link does to bytes: when each chunk may go on. Pure but for its random
generator.
"""

from __future__ import annotations

import math
import random

from chaos.fault.targets import LinkShape

RTO_S = 0.2  # Linux's smallest retransmission timeout
SEGMENT_BYTES = 1448  # of TCP on Ethernet; over loopback segments are 45 times as big
SMALLEST_CHUNK = 2048
BIGGEST_CHUNK = 65536
OPEN_CHUNK = 1 << 20  # of a link that nothing is done to
SLICE_S = 0.005  # a chunk of a throttled link takes about so long
IN_FLIGHT_BYTES = 8 << 20  # what a delayed link holds at most

OPEN = LinkShape()


class Pacer:
    """One direction of one connection. Times are monotonic seconds.

    A lost segment is one that comes a retransmission timeout later, and everything behind it: TCP
    hands bytes over in order. No byte is ever dropped.
    """

    def __init__(self, shape: LinkShape, since_s: float, seed: int = 0) -> None:
        self.shape = shape
        self._since_s = since_s
        self._free_s = 0.0
        self._last_s = 0.0
        self._random = random.Random(seed)

    @property
    def chunk(self) -> int:
        """Most bytes to read at once, so that what is read leaves smoothly."""
        rate = self.shape.bytes_per_s
        if rate is None:
            return OPEN_CHUNK if self.shape == OPEN else BIGGEST_CHUNK
        return max(SMALLEST_CHUNK, min(BIGGEST_CHUNK, int(rate * SLICE_S)))

    @property
    def held(self) -> int:
        """Bytes that may wait in the link: those on their way, and one chunk."""
        rate, delay_s = self.shape.bytes_per_s, self.shape.delay_s + self.shape.jitter_s
        if rate is None:
            return IN_FLIGHT_BYTES
        return min(IN_FLIGHT_BYTES, int(rate * (delay_s + 2 * SLICE_S)) + self.chunk)

    def opens_s(self, now_s: float) -> float:
        """When something may pass next: now, at the end of a flap, or never (infinity)."""
        if self.shape.blocked:
            return math.inf
        down_s, up_s = self.shape.down_s, self.shape.up_s
        if not down_s:
            return now_s
        into_s = (now_s - self._since_s) % (down_s + up_s)
        return now_s + down_s - into_s if into_s < down_s else now_s

    def release_s(self, now_s: float, size: int) -> float:
        """When ``size`` more bytes, read now, may go on."""
        shape = self.shape
        # Whoever copies wakes up a little late; what that costs may be made up for within a slice.
        start_s = max(now_s - SLICE_S, self._free_s)
        self._free_s = start_s + (size / shape.bytes_per_s if shape.bytes_per_s else 0.0)
        due_s = max(now_s, self._free_s) + shape.delay_s
        if shape.jitter_s:
            due_s += self._random.uniform(-1, 1) * min(shape.jitter_s, shape.delay_s)
        if shape.loss and self._random.random() > (1 - shape.loss) ** math.ceil(
            size / SEGMENT_BYTES
        ):
            due_s += RTO_S
        self._last_s = max(self._last_s, due_s)
        return self._last_s
