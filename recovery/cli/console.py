"""Status lines of ``recovery.run`` for a person, on standard error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.recovery.checkpoint.memory import ROLE as KEEPER
from trainchaos.recovery.cli.takeover_log import TakeoverLog
from trainchaos.recovery.policy.strategy import ANNOUNCED
from trainchaos.recovery.process.output import say
from trainchaos.recovery.supervise.controller import Stage
from trainchaos.recovery.supervise.loop import Observer
from trainchaos.recovery.supervise.supervisor import Supervisor

MOST_PIDS = 64  # in a line
_TRAINS = (Stage.TRAINING, Stage.PAUSING)


class JobListener(Observer):
    """Follows a job for a person; here each method does nothing."""

    def on_recovered(self, seconds: float, step: int) -> None:
        """After a failure the first step beyond all earlier ones is committed; seconds since it was
        detected.
        """

    def on_failed_save(self, checkpoint: str, error: str) -> None:
        """A checkpoint could not be saved; training goes on."""


class Outage:
    """Tells a listener when the job is past a failure that stopped it."""

    def __init__(self, listener: JobListener) -> None:
        self._listener = listener
        self._since_s: float | None = None
        self._step = 0

    def begins(self, job: Supervisor) -> None:
        """A failure stops the job. Of several in a row the first counts."""
        if self._since_s is None:
            self._since_s, self._step = job.now_s(), job.controller.committed

    def look(self, job: Supervisor) -> None:
        """Whether a step beyond all earlier ones is committed, by a generation that trains: of one
        that was broken, members may still report what they had done before. Costs something only
        after a failure: the step of a large job takes a while to find out.
        """
        controller = job.controller
        done = controller.outcome == "completed"
        if self._since_s is None or not (done or controller.stage in _TRAINS):
            return
        step = controller.committed
        if step > self._step:
            self._listener.on_recovered(job.now_s() - self._since_s, step)
            self._since_s = None


class ConsoleListener(JobListener):
    """Prints a line on standard error for everything that a person wants to know."""

    def __init__(self, takeover: TakeoverLog | None) -> None:
        self._pids = {name: pid for name, (_, pid) in takeover.living.items()} if takeover else {}
        self._steps = takeover.steps if takeover else 0

    def on_event(self, event: Event) -> None:
        """Print a line, if the event is worth one."""
        if event.kind is Kind.PROCESS_SPAWNED:
            self._pids[event.data["process"]] = event.data["pid"]
        elif event.kind is Kind.PROCESS_EXITED:
            self._pids.pop(event.data["process"], None)
        text = _describe(event)
        if event.kind is Kind.RUN_STARTED:
            self._steps = event.data["steps"]
        if event.kind is Kind.GENERATION_READY and event.data["resume_step"] >= self._steps:
            text += f": of {self._steps} none is left"
        elif event.kind is Kind.GENERATION_READY:
            members = event.data["members"]
            pids = " ".join(str(self._pids.get(name, "gone")) for name in members[:MOST_PIDS])
            more = f" and {len(members) - MOST_PIDS} more" if len(members) > MOST_PIDS else ""
            text += f"; pids {pids}{more}"
        if text:
            say(text)

    def on_recovered(self, seconds: float, step: int) -> None:
        """Print how long a recovery took."""
        say(f"recovered: step {step} committed {seconds:.2f} s after the failure was detected")

    def on_failed_save(self, checkpoint: str, error: str) -> None:
        say(f"checkpoint {checkpoint} could not be saved, training goes on: {error}")


def _describe(event: Event) -> str:
    """What an event means for a person; empty for most."""
    data = event.data
    match event.kind:
        case Kind.RUN_STARTED:
            spares = f" + {data['spares']} spare" if data["spares"] else ""
            return (
                f"{data['cell']}: {data['steps']} steps, {data['ranks']} ranks{spares},"
                f" {data['strategy']}"
            )
        case Kind.GENERATION_READY:
            origin = f", restored from {data['checkpoint']}" if data["checkpoint"] else ""
            ranks, step = len(data["members"]), data["resume_step"]
            return f"generation {event.generation}: {ranks} ranks train after step {step}{origin}"
        case Kind.FAILURE_DETECTED:
            who = data["process"] or "no rank"
            who = who if data["rank"] is None else f"rank {data['rank']} ({who})"
            word = data["cause"] if data["cause"] in ANNOUNCED else "failure"
            return f"{word}: {who}, {data['cause']}: {data['detail']}"
        case Kind.DECISION:
            return f"decision: {data['reason']}"
        case Kind.PROCESS_EXITED if not data["expected"]:
            code, number = data["exit_code"], data["signal"]
            lost = ", and what it kept in memory is gone" if data.get("role") == KEEPER else ""
            return (
                f"{data['process']} ended{lost}:"
                f" {f'exit code {code}' if number is None else f'signal {number}'}"
            )
        case Kind.COORDINATOR_ADOPTED:
            return (
                f"took over {len(data['members'])} ranks from a supervisor last heard of"
                f" {data['down_s']:.1f} s ago"
            )
        case Kind.NODE_JOINED:
            return f"node {data['node']} is there: {data['host']} at {data['address']}"
        case Kind.TAINTS_HONOURED:
            places = "; ".join(f"{each['place']} ({each['reason']})" for each in data["taints"])
            return f"tainted, and not used while there are others: {places}"
        case Kind.NODE_LOST:
            return f"node {data['node']} is lost: {data['why']}"
        case Kind.FILES_DROPPED:
            return (
                f"{len(data['files'])} logs deleted or cut ({data['bytes'] / 1e6:.0f} MB):"
                f" {data['why']}"
            )
        case Kind.LEFTOVERS if data["processes"]:
            return f"left behind: {data['processes']}"
        case Kind.RUN_FINISHED:
            return f"{data['outcome']}: {data['reason']}"
    return _of_health(event)


def _of_health(event: Event) -> str:
    data = event.data
    match event.kind:
        case Kind.HEALTH_REPORTED:
            return f"health: {data['what']} {data['code']} of {_place(data)}"
        case Kind.HEALTH_ALARM:
            return f"health: {data['what']} of {_place(data)}: {data['value']:.3g}"
        case Kind.PLACE_CHECKED:
            found = {True: "fit", False: "unfit", None: "not known to be fit"}[data["fit"]]
            return (
                f"node {data['node']}, {data['device']} is {found}: {data['said'] or data['why']}"
            )
        case Kind.PLACE_TAINTED:
            return f"{data['place']} is tainted, by {data['by']}"
    return ""


def _place(data: Mapping[str, Any]) -> str:
    """The place of a health event."""
    named = [f"{key} {data[key]}" for key in ("rank", "device", "node") if data[key] is not None]
    return ", ".join(named) or "the job"
