"""The excluded samples that a process has received from its supervisor."""

from __future__ import annotations

from collections.abc import Mapping

from trainchaos.recovery.transport.wire import Join, LeaveOut


class ReceivedExclusions:
    """Collects the messages in the order in which they arrive."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}

    def add(self, message: LeaveOut) -> None:
        """Add more samples, or start anew. Raises RuntimeError when a message in between is
        missing.
        """
        if not message.after:
            self._since = {}
        if message.after != len(self._since):
            raise RuntimeError(
                f"told of samples after {message.after}, and of {len(self._since)} before"
            )
        self._since.update(zip(message.samples, message.since, strict=True))

    def of(self, order: Join) -> Mapping[int, int]:
        """All samples that this generation leaves out: sample -> first step without it. Raises
        RuntimeError when some are missing: a rank that trains with other samples than its peers
        must not.
        """
        if order.left_out != len(self._since):
            raise RuntimeError(
                f"{order.left_out} samples are left out, and it was told of {len(self._since)}"
            )
        return self._since
