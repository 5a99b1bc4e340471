"""Work other than training that ranks announce: while one does it, no step is due."""

from __future__ import annotations

from trainchaos.chaos.events.log import Kind
from trainchaos.harness.arm.fault_context import RecordEvent

NS = 1e9


class OtherWork:
    """What ranks announced (``beacon.busy``). ``record``: writes events."""

    def __init__(self, record: RecordEvent) -> None:
        self._record = record
        self._until_ns: dict[int | None, int] = {}
        self._doing: dict[int | None, tuple[str, int]] = {}  # that work, and when it began

    def __bool__(self) -> bool:
        """Whether a rank announced some and has reported no step since."""
        return bool(self._until_ns)

    @property
    def until_ns(self) -> int:
        """Until when a rank has announced it; 0 if none has."""
        return max(self._until_ns.values(), default=0)

    def begin(self, rank: int | None, what: str, limit_s: float, now_ns: int) -> None:
        """A rank announced work that takes at most ``limit_s`` seconds; 0: it is over."""
        self._until_ns[rank] = now_ns + int(limit_s * NS)  # a step is expected from then on
        self.end(rank, now_ns)
        if limit_s:
            self._doing[rank] = what, now_ns
            self._record(Kind.BUSY, rank=rank, what=what, limit_s=limit_s)

    def on_step(self, rank: int | None, now_ns: int) -> None:
        """A rank reported a step."""
        self._until_ns.pop(rank, None)
        self.end(rank, now_ns)

    def end(self, rank: int | None, now_ns: int) -> None:
        """Record that the rank's other work, if any, is over."""
        if (doing := self._doing.pop(rank, None)) is not None:
            seconds = round((now_ns - doing[1]) / NS, 6)
            self._record(Kind.BUSY_ENDED, rank=rank, what=doing[0], seconds=seconds)
