"""Stands in for the agents that a command's ranks do not have.

A rank of a built-in workload is told where it has to hold for a fault, and says when it does. A command cannot hold:
here its points are kept, and a point is reached once the step before it was reported done.
"""

from __future__ import annotations

from recovery.wire import Extra, Message


class Agents:
    """The points that the injector has given to the ranks of the present generation."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[str, int, str]]] = {}

    def forget(self) -> None:
        """A new generation: other processes, other points."""
        self._points = {}

    def take(self, process: str, message: Message) -> bool:
        """What the injector tells a rank."""
        if isinstance(message, Extra) and message.topic == "arm":
            rows = message.payload["points"]
            self._points[process] = [(row["fault"], int(row["step"]), row["phase"]) for row in rows]
        return True

    def due(self, committed: int, resumed_after: int) -> list[tuple[str, Extra]]:
        """(process, message) for every point that is reached with so many steps done, once each.

        ``resumed_after``: the step that the generation began with; points at or before it are past.
        """
        found = []
        for process, points in self._points.items():
            mine = [point for point in points if point[1] <= committed + 1]
            self._points[process] = [point for point in points if point not in mine]
            for fault, step, phase in mine:
                if step > resumed_after:
                    payload = {"fault": fault, "step": step, "phase": phase}
                    found.append((process, Extra(topic="at_point", payload=payload)))
        return found
