"""What a process was told of samples that the job leaves out."""

from __future__ import annotations

from collections.abc import Mapping

from recovery.transport.wire import Join, LeaveOut


class Told:
    """Kept by whoever is told, in the order of messages."""

    def __init__(self) -> None:
        self._since: dict[int, int] = {}

    def hear(self, message: LeaveOut) -> None:
        """Some more, or all anew. Raises RuntimeError when something in between did not come."""
        if not message.after:
            self._since = {}
        if message.after != len(self._since):
            raise RuntimeError(
                f"told of samples after {message.after}, and of {len(self._since)} before"
            )
        self._since.update(zip(message.samples, message.since, strict=True))

    def of(self, order: Join) -> Mapping[int, int]:
        """All that this generation leaves out: sample -> first step without it. Raises RuntimeError
        when some of it did not come: a rank that trains with other samples than its peers must not.
        """
        if order.left_out != len(self._since):
            raise RuntimeError(
                f"{order.left_out} samples are left out, and it was told of {len(self._since)}"
            )
        return self._since
