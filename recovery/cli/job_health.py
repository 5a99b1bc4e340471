"""What health services find at the places of a job's processes, and who is warned of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from pydantic import ValidationError

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.cli.job_spec import JobSpec
from trainchaos.recovery.cli.processes import JobProcesses
from trainchaos.recovery.health.care.place_care import PlaceCare
from trainchaos.recovery.health.job_watch import job_service
from trainchaos.recovery.health.readings.signs import MODELS, Sign, event_of
from trainchaos.recovery.health.service import HealthService
from trainchaos.recovery.health.warnings import PlaceWarnings
from trainchaos.recovery.process.output import say
from trainchaos.recovery.supervise.controller import Controller


class JobPlaces:
    """The job's places, as ``recovery.health.warnings.Places``. A device of node 1 is called
    ``cuda:0@1``: every node has a first device.
    """

    def __init__(self, processes: JobProcesses, controller: Controller) -> None:
        self._processes, self._controller = processes, controller

    def living(self) -> Collection[str]:
        """Processes whose exit is not recorded."""
        return list(self._processes.pids)

    def gone(self, process: str) -> bool:
        """Whether its exit is recorded."""
        return process not in self._processes.pids

    def node_of(self, process: str) -> int | None:
        """Its node; 0 without nodes."""
        spot = self._processes.spot_of(process)
        return None if spot is None else spot[0]

    def device_of(self, process: str) -> str | None:
        """Its device and node."""
        spot = self._processes.spot_of(process)
        return None if spot is None else device_at(spot[1], spot[0])

    def process_of(self, rank: int) -> str | None:
        """The living process that holds a rank."""
        process = self._controller.process_of(rank)
        return None if process is None or self.gone(process) else process

    def avoid(self, *, nodes: Collection[int], devices: Collection[str]) -> None:
        """Start processes there only where there is no other place."""
        self._processes.avoid(lambda node, name: node in nodes or device_at(name, node) in devices)


def device_at(device: str, node: int) -> str:
    """The name of a device among those of all nodes."""
    return f"{device}@{node}"


class JobHealth:
    """``service``: of this machine, whose processes are at node 0; None: nodes have their own.
    ``write``: writes an event; ``spec``: of the job, which is watched from its ranks' event logs;
    ``care``: hears of all that is found at a place.
    """

    def __init__(
        self,
        processes: JobProcesses,
        controller: Controller,
        service: HealthService | None,
        write: Callable[..., Any],
        spec: JobSpec,
        care: PlaceCare,
    ) -> None:
        self._controller, self._service, self._write = controller, service, write
        self._care = care
        self._warnings = PlaceWarnings(JobPlaces(processes, controller))
        care.when_fit(lambda node, device: self._warnings.lift(device_at(device, node)))
        self._watch, self._detectors = job_service(
            spec.events, shards=spec.shards, clock_s=time.monotonic
        )

    def start(self) -> None:
        """Begin to read this machine's health, and the job's."""
        self._watch.start()
        if self._service is not None:
            self._service.start()

    def look(self) -> None:
        """Record what was found here and in the job since the last look, and warn of it, and of
        what nodes found.
        """
        self._detectors.steps = self._controller.steps  # known once a rank is ready
        for sign in self._watch.take():
            kind, data = event_of(sign)
            self._write(kind, **data)
        if self._service is not None:
            for sign in self._service.take():
                kind, data = event_of(sign)
                self._write(kind, **data)
                self.heard(sign if sign.node is not None else sign.model_copy(update={"node": 0}))
            for problem in self._service.problems():
                say(f"health: {problem}")
        self._warnings.tell(lambda act: act(self._controller))

    def heard(self, sign: Sign) -> None:
        """Something was found at a node, and is recorded already."""
        holder = None if sign.rank is None else self._controller.process_of(sign.rank)
        self._care.heard(sign, holder)
        if sign.device is not None and sign.node is not None:
            named = device_at(sign.device, sign.node)
            sign = sign.model_copy(update={"device": named})
        self._warnings.heard(sign)

    def recall(self, events: Sequence[Event]) -> None:
        """Hear again what a lost supervisor had recorded of places: it may not have acted on it. A
        report about a rank is left out, as another process may hold the rank by now, and one about
        a device that was found fit since.
        """
        self._care.recall(events)
        fit: set[tuple[Any, Any]] = set()  # found so later
        told: list[Event] = []
        for event in reversed(events):
            spot = event.data.get("node") or 0, event.data.get("device")
            if event.kind is Kind.PLACE_CHECKED and event.data["fit"]:
                fit.add(spot)
            elif event.kind in MODELS and event.data.get("rank") is None and spot not in fit:
                told.append(event)
        for event in reversed(told):
            with contextlib.suppress(ValidationError):  # written by another version
                self.heard(MODELS[event.kind].model_validate(event.data))

    def close(self) -> None:
        """Read no more."""
        self._watch.close()
        if self._service is not None:
            self._service.close()
