"""What health services find at the places of a job's processes, and who is warned of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from trainchaos.recovery.cli.job_spec import JobSpec
from trainchaos.recovery.health.job_watch import job_service
from trainchaos.recovery.health.reputation import PlaceCare
from trainchaos.recovery.health.service import HealthService
from trainchaos.recovery.health.signs import Sign, event_of
from trainchaos.recovery.process.output import say
from trainchaos.recovery.supervise.controller import Controller


class JobHealth:
    """``service``: of this machine, whose processes are at node 0; None: nodes have their own.
    ``write``: writes an event; ``spec``: of the job, which is watched from its ranks' event logs;
    ``care``: hears of all that is found at a place.
    """

    def __init__(
        self,
        controller: Controller,
        service: HealthService | None,
        write: Callable[..., Any],
        spec: JobSpec,
        care: PlaceCare,
    ) -> None:
        self._controller, self._service, self._write = controller, service, write
        self._care = care
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
        self._care.look(lambda act: act(self._controller))

    def heard(self, sign: Sign) -> None:
        """Something was found at a node, and is recorded already."""
        holder = None if sign.rank is None else self._controller.process_of(sign.rank)
        self._care.heard(sign, holder)

    def close(self) -> None:
        """Read no more."""
        self._watch.close()
        if self._service is not None:
            self._service.close()
