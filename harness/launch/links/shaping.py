"""When each chunk may pass a shaped link. Pure except for its random generator."""

from __future__ import annotations

import math
import random

from trainchaos.chaos.fault.targets import LinkShape

RTO_S = 0.2  # Linux's smallest retransmission timeout
SEGMENT_BYTES = 1448  # of TCP on Ethernet; segments over loopback are 45 times as big
SMALLEST_CHUNK = 2048
BIGGEST_CHUNK = 65536
OPEN_CHUNK = 1 << 20  # of an unshaped link
SLICE_S = 0.005  # duration of a chunk on a throttled link, approximately
IN_FLIGHT_BYTES = 8 << 20  # the most that a delayed link holds

OPEN = LinkShape()


class Pacer:
    """One direction of one connection. Times are monotonic seconds.

    A lost segment arrives a retransmission timeout later, and so does everything behind it: TCP
    delivers bytes in order. No byte is ever dropped.
    """

    def __init__(self, shape: LinkShape, since_s: float, seed: int = 0) -> None:
        self.shape = shape
        self._since_s = since_s
        self._free_s = 0.0
        self._last_s = 0.0
        self._random = random.Random(seed)

    @property
    def chunk(self) -> int:
        """Most bytes to read at once, so that bytes leave smoothly."""
        rate = self.shape.bytes_per_s
        if rate is None:
            return OPEN_CHUNK if self.shape == OPEN else BIGGEST_CHUNK
        return max(SMALLEST_CHUNK, min(BIGGEST_CHUNK, int(rate * SLICE_S)))

    @property
    def held(self) -> int:
        """Bytes that may wait in the link: those in flight, and one chunk."""
        rate, delay_s = self.shape.bytes_per_s, self.shape.delay_s + self.shape.jitter_s
        if rate is None:
            return IN_FLIGHT_BYTES
        return min(IN_FLIGHT_BYTES, int(rate * (delay_s + 2 * SLICE_S)) + self.chunk)

    def opens_s(self, now_s: float) -> float:
        """When bytes may pass next: now, at the end of a flap, or never (infinity)."""
        if self.shape.blocked:
            return math.inf
        down_s, up_s = self.shape.down_s, self.shape.up_s
        if not down_s:
            return now_s
        into_s = (now_s - self._since_s) % (down_s + up_s)
        return now_s + down_s - into_s if into_s < down_s else now_s

    def release_s(self, now_s: float, size: int) -> float:
        """When ``size`` more bytes, read now, may be forwarded."""
        shape = self.shape
        # The copying thread wakes up a little late; it may catch up within a slice.
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
