"""One clock for one arm: times of ranks on other machines, brought to the coordinator's clock.

Every event carries the monotonic clock of its writer's machine. The offset of each node's clock is
measured from time to time (``clock_measured``), to within a bound. Between two measurements it is
interpolated, so that the corrected clock neither jumps nor runs backwards, as it would if each time
took the nearest measurement's offset; before the first and after the last measurement the offset is
constant. Away from a measurement, the bound grows by DRIFT, the drift allowed between two machines:
crystals differ by some 50 ppm, and by more while a time service slews one of them. Processes on the
coordinator's own machine (same boot id) share its clock and need no correction.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import TYPE_CHECKING

from trainchaos.chaos.events.kinds import Kind

if TYPE_CHECKING:
    from trainchaos.chaos.events.event import Event

DRIFT = 200e-6  # seconds per second


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ClockMeasurement:
    """``offset_ns``: the node's clock less the coordinator's, at the coordinator's ``time_ns``."""

    time_ns: int
    offset_ns: int
    bound_ns: int

    @property
    def node_ns(self) -> int:
        """The same moment by the node's clock."""
        return self.time_ns + self.offset_ns

    def reach_ns(self, node_ns: int) -> float:
        """How far the offset at another time may differ from this one."""
        return self.bound_ns + DRIFT * abs(node_ns - self.node_ns)


class Machine:
    """One machine that was a node for a while, with its clock measurements in time order."""

    def __init__(self, node: int, host: str) -> None:
        self.node = node
        self.host = host
        self.measured: list[ClockMeasurement] = []

    def offset_ns(self, node_ns: int) -> tuple[int, int]:
        """(offset, bound) at a time of the node's clock. Raises IndexError if nothing
        was measured.
        """
        before, after = self._around(node_ns)
        gap = after.node_ns - before.node_ns
        share = (node_ns - before.node_ns) / gap if gap > 0 else 0.0
        offset = before.offset_ns + round(share * (after.offset_ns - before.offset_ns))
        reaches = [(one.offset_ns, one.reach_ns(node_ns)) for one in (before, after)]
        low, high = max(o - r for o, r in reaches), min(o + r for o, r in reaches)
        if low > high:  # they contradict each other, and ``problems`` says so
            low, high = min(o - r for o, r in reaches), max(o + r for o, r in reaches)
        return offset, round(max(high - offset, offset - low, 0.0))

    def _around(self, node_ns: int) -> tuple[ClockMeasurement, ClockMeasurement]:
        index = bisect.bisect(self.measured, node_ns, key=lambda one: one.node_ns)
        return self.measured[max(0, index - 1)], self.measured[min(index, len(self.measured) - 1)]

    def problems(self) -> list[str]:
        """Measurements that cannot both be true."""
        found = []
        for one, other in zip(self.measured, self.measured[1:], strict=False):
            moved = abs(other.offset_ns - one.offset_ns)
            if moved > one.reach_ns(other.node_ns) + other.bound_ns:
                seconds = (other.time_ns - one.time_ns) / 1e9
                found.append(
                    f"the clock of node {self.node} ({self.host}) moved by {moved / 1e6:.3f} ms in"
                    f" {seconds:.1f} s: times of its ranks cannot be compared with others"
                )
        return found


class Clocks:
    """Clocks of all nodes, from the orchestrator's events. Pass it every event in order, while they
    are written or read.
    """

    def __init__(self) -> None:
        self._boot: str | None = None
        self._machines: dict[tuple[int, str], Machine] = {}
        self._now: dict[int, Machine] = {}  # node -> its current machine
        self._home: dict[str, Machine] = {}  # process -> the remote machine it was started on

    def observe(self, event: Event) -> None:
        """Take an event of the orchestrator into account."""
        data = event.data
        if event.kind is Kind.ACTOR_STARTED:
            self._boot = data.get("boot")
        elif event.kind is Kind.NODE_JOINED:
            self._now.pop(data["node"], None)
            if data["boot"] != self._boot:
                key = (data["node"], data["boot"])
                self._now[data["node"]] = self._machines.setdefault(
                    key, Machine(data["node"], data["host"])
                )
        elif event.kind is Kind.CLOCK_MEASURED and data["node"] in self._now:
            self._now[data["node"]].measured.append(
                ClockMeasurement(
                    time_ns=event.time_ns, offset_ns=data["offset_ns"], bound_ns=data["bound_ns"]
                )
            )
        elif event.kind is Kind.PROCESS_SPAWNED and data.get("node") in self._now:
            self._home[data["process"]] = self._now[data["node"]]

    @property
    def one(self) -> bool:
        """Whether all processes share a clock, as far as was measured: no time has an error."""
        return not any(machine.measured for machine in self._home.values())

    def corrected(self, event: Event) -> Event:
        """The event with its time on the coordinator's clock; unchanged if no offset is known."""
        machine = self._home.get(event.actor)
        if machine is None or not machine.measured:
            return event
        return dataclasses.replace(
            event, time_ns=event.time_ns - machine.offset_ns(event.time_ns)[0]
        )

    def bound_ns(self, event: Event) -> int:
        """Maximum error of an event time returned by ``corrected``."""
        machine = self._home.get(event.actor)
        if machine is None or not machine.measured:
            return 0
        offset = machine.offset_ns(event.time_ns + machine.measured[0].offset_ns)[0]
        return machine.offset_ns(event.time_ns + offset)[1]

    def unsure(self) -> dict[str, str]:
        """Process -> why its times cannot be compared with others: its clock was never measured, or
        measurements contradict each other.
        """
        found = {}
        for name, machine in self._home.items():
            if not machine.measured:
                where = f"node {machine.node} ({machine.host})"
                found[name] = f"{name} ran on {where}, whose clock was never measured"
            elif problems := machine.problems():
                found[name] = problems[0]
        return found
