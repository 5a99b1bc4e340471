"""Diagnoses a run from its event log alone: what happened, to whom, whose it is, what to do.

Reads a stripped log (``strip``): no event of it says what was injected. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import ORCHESTRATOR, Log
from trainchaos.harness.explain.diagnosis import CauseClass, DiagnosedIncident, Layer
from trainchaos.harness.explain.pace import slownesses
from trainchaos.harness.explain.scene import Scene, silence_s
from trainchaos.harness.explain.strip import strip
from trainchaos.recovery.health.signs import entry_of
from trainchaos.recovery.playbook.book import match_text, playbook
from trainchaos.recovery.playbook.entry import Action, Cause, Entry, Owner

KILL, SEGMENTATION_FAULT = 9, 11
CRASHES = (4, 6, 7, 8, SEGMENTATION_FAULT)
"""Signals that a program's own error ends it by: SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV."""
SLOW_SAVE = 4.0
"""Duration of a save, in medians of those of the run, from which the disk is slow."""
LEAST_SAVES = 4
"""Without which nothing is said of one."""
LATE_S = 0.1
"""Seconds above the median from which a save is slow."""
SLOW_FORMING_S = 0.5
"""Seconds above the first formation of a group from which the store is slow, where no connection
was.
"""
ONE_FOR_ALL = "all ranks wait in one collective"
"""Words of the supervisor where nobody is behind."""
USUAL: Mapping[CauseClass, tuple[Layer, Action]] = {
    CauseClass.PROCESS_DEATH: (Layer.SYSTEM, Action.RESTART),
    CauseClass.CODE: (Layer.APPLICATION, Action.RESTART),
    CauseClass.NODE_LOSS: (Layer.HARDWARE, Action.RESTART_ELSEWHERE),
    CauseClass.HANG: (Layer.APPLICATION, Action.RESTART),
    CauseClass.FALSE_ALARM: (Layer.SYSTEM, Action.WATCH),
    CauseClass.SLOWNESS: (Layer.SYSTEM, Action.WATCH),
    CauseClass.LINK: (Layer.NETWORK, Action.CHECK_HARDWARE),
    CauseClass.STORAGE: (Layer.STORAGE, Action.WATCH),
    CauseClass.DATA: (Layer.STORAGE, Action.WATCH),
    CauseClass.NONFINITE: (Layer.APPLICATION, Action.OLDER_CHECKPOINT),
    CauseClass.SILENT_CORRUPTION: (Layer.HARDWARE, Action.CHECK_HARDWARE),
    CauseClass.MEMORY: (Layer.APPLICATION, Action.FIX_CONFIGURATION),
    CauseClass.DEVICE: (Layer.HARDWARE, Action.WATCH),
    CauseClass.PREEMPTION: (Layer.SYSTEM, Action.RESTART_ELSEWHERE),
    CauseClass.COORDINATOR: (Layer.SYSTEM, Action.WATCH),
}
"""Whose a cause usually is, and what to do about it."""
_BY_ENTRY: Mapping[Cause, tuple[CauseClass, Layer]] = {
    Cause.DEVICE: (CauseClass.DEVICE, Layer.HARDWARE),
    Cause.DEVICE_MEMORY: (CauseClass.DEVICE, Layer.HARDWARE),
    Cause.BUS: (CauseClass.DEVICE, Layer.HARDWARE),
    Cause.GPU_LINK: (CauseClass.LINK, Layer.HARDWARE),
    Cause.NETWORK: (CauseClass.LINK, Layer.NETWORK),
    Cause.STORAGE: (CauseClass.STORAGE, Layer.STORAGE),
    Cause.HOST_MEMORY: (CauseClass.MEMORY, Layer.SYSTEM),
    Cause.LIMIT: (CauseClass.MEMORY, Layer.APPLICATION),
}
"""Where an entry's cause says which class an error is of; others are the program's own."""


class _Reading(NamedTuple):
    """What a piece of evidence means; None: as usual for the cause."""

    cause: CauseClass
    why: str
    action: Action | None = None
    layer: Layer | None = None


def diagnose(log: Log) -> list[DiagnosedIncident]:
    """The incidents of an arm in order of time, each cause at each place once: what comes again is
    the same incident. Fault events in ``log`` are not looked at.
    """
    scene = Scene(strip(log))
    found = [*_failures(scene), *_storage(scene), *_control(scene), *_reports(scene)]
    found += _slow(scene, found)
    seen: dict[tuple[object, ...], DiagnosedIncident] = {}
    for one in sorted(found, key=lambda one: one.at_s):
        seen.setdefault((one.cause, one.rank, one.node), one)
    return list(seen.values())


def _made(
    scene: Scene,
    time_ns: float,
    said: _Reading,
    *,
    rank: int | None = None,
    node: int | None = None,
) -> DiagnosedIncident:
    layer, action = USUAL[said.cause]
    return DiagnosedIncident(
        at_s=max(0.0, round((time_ns - scene.start_ns) / 1e9, 6)),
        cause=said.cause,
        rank=rank,
        node=node,
        layer=said.layer or layer,
        action=said.action or action,
        why=said.why,
    )


def _failures(scene: Scene) -> Iterator[DiagnosedIncident]:
    """One incident for each group of failures that were answered together and belong together."""
    for group in scene.failure_groups():
        nodes = scene.nodes_lost(group)
        for node, of_node in nodes.items():
            why = f"all processes of node {node} failed together"
            said = _Reading(CauseClass.NODE_LOSS, why)
            yield _made(scene, of_node[0].time_ns, said, node=node)
        taken = {event.seq for of_node in nodes.values() for event in of_node}
        for failure in group:
            if failure.seq not in taken and not scene.had_notice(failure):
                said = _read(scene, failure)
                rank = None if said.cause is CauseClass.LINK else failure.data["rank"]
                yield _made(scene, failure.time_ns - 1e9 * silence_s(failure), said, rank=rank)


def _read(scene: Scene, failure: Event) -> _Reading:
    """What one declared failure means."""
    data, detail = failure.data, str(failure.data["detail"])
    match data["cause"]:
        case "exit" | "start-timeout":
            return _exit(scene, failure)
        case "hang":
            return _hang(scene, failure)
        case "nonfinite" if scene.skipped_after(failure):
            why = "the samples that made it were found and left out"
            return _Reading(CauseClass.DATA, why, Action.FIX_CODE, Layer.APPLICATION)
        case "nonfinite":
            return _Reading(CauseClass.NONFINITE, detail)
        case "diverged":
            return _Reading(CauseClass.SILENT_CORRUPTION, detail)
        case "notice":
            return _Reading(CauseClass.PREEMPTION, detail)
        case "warning":
            reports = scene.log.of(Kind.HEALTH_REPORTED)
            before = [e for e in reports if e.time_ns <= failure.time_ns]
            entry = _entry(before[-1]) if before else None
            action = entry.action if entry else Action.CHECK_HARDWARE
            return _Reading(CauseClass.DEVICE, detail, action)
        case "error" if data["process"] is None and scene.all_worked_on(failure):
            why = "all ranks went on while one was taken to wait"
            return _Reading(CauseClass.FALSE_ALARM, why)
        case "error" if data["process"] is None or ONE_FOR_ALL in detail:
            return _Reading(CauseClass.LINK, detail)
    error = scene.last_error(data["process"], failure.time_ns)
    return _error(error) if error is not None else _Reading(CauseClass.CODE, detail)


def _hang(scene: Scene, failure: Event) -> _Reading:
    detail = str(failure.data["detail"])
    if scene.worked_on(failure):
        why = "its own log shows that it went on while it was taken for silent"
        return _Reading(CauseClass.FALSE_ALARM, why)
    if " in data of step" in detail and not failure.data.get("stopped"):
        return _Reading(CauseClass.DATA, detail, Action.RESTART)
    return _Reading(CauseClass.HANG, detail)


def _exit(scene: Scene, failure: Event) -> _Reading:
    ended = scene.exits.get(failure.data["process"])
    error = scene.last_error(failure.data["process"], failure.time_ns)
    signal = ended.data["signal"] if ended is not None else None
    detail = str(failure.data["detail"])
    if ended is None or signal is None:
        return _error(error) if ended and error else _Reading(CauseClass.CODE, detail)
    if signal in CRASHES:
        entry = playbook().by_signal(signal)
        return _Reading(CauseClass.CODE, detail, entry.action if entry else None)
    if signal == KILL and (device := scene.device_left(ended)):
        why = f"killed, and {device} took no process any more"
        return _Reading(CauseClass.DEVICE, why, Action.DRAIN_NODE)
    if signal == KILL and (checkpoint := scene.saving(ended)):
        return _Reading(CauseClass.PROCESS_DEATH, f"killed while it saved {checkpoint}")
    return _Reading(CauseClass.PROCESS_DEATH, detail)


def _error(error: Event) -> _Reading:
    """What an error's type and text mean."""
    kind, message = str(error.data["type"]), str(error.data["message"])
    text = f"{kind}: {message}"
    if "OutOfMemory" in kind:
        return _Reading(CauseClass.MEMORY, text)
    if "Device" in kind or "CUDA error" in message:
        return _Reading(CauseClass.DEVICE, text, Action.RESTART)
    for match in match_text(text.splitlines()):
        if match.entry.cause in _BY_ENTRY:
            cause, layer = _BY_ENTRY[match.entry.cause]
            return _Reading(cause, text, match.entry.action, layer)
    return _Reading(CauseClass.CODE, text, Action.FIX_CODE)


def _entry(report: Event) -> Entry | None:
    return entry_of(str(report.data["what"]), report.data["code"])


def _reports(scene: Scene) -> Iterator[DiagnosedIncident]:
    """Reports of the health source; those that announce a failure were declared one, unless it
    was too late.
    """
    for event in scene.log.of(Kind.HEALTH_REPORTED):
        rank, entry = event.data["rank"], _entry(event)
        heeded = entry and (entry.move or entry.owner is not Owner.HARDWARE)
        why = f"the health source reported {event.data['what']} {event.data['code']}"
        said = _Reading(CauseClass.DEVICE, why, entry.action if entry and heeded else None)
        node = event.data["node"] if rank is None else None
        yield _made(scene, event.time_ns, said, rank=rank, node=node)


def _storage(scene: Scene) -> Iterator[DiagnosedIncident]:
    """Saves that failed or were slow, and checkpoints that were refused."""
    for event in scene.log.of(Kind.CHECKPOINT_FAILED):
        text = str(event.data["error"])
        entries = (match.entry for match in match_text(text.splitlines()))
        entry = next((one for one in entries if one.cause is Cause.STORAGE), None)
        said = _Reading(CauseClass.STORAGE, text, entry.action if entry else None)
        yield _made(scene, event.time_ns, said)
    for event in scene.log.of(Kind.CHECKPOINT_REFUSED):
        why = f"refused: {event.data['reason']}"
        said = _Reading(CauseClass.STORAGE, why, Action.OLDER_CHECKPOINT)
        yield _made(scene, event.time_ns, said)
    saves = list(scene.log.of(Kind.CHECKPOINT_COMMITTED))
    usual = median(event.data["seconds"] for event in saves) if saves else 0.0
    limit = max(SLOW_SAVE * usual, usual + LATE_S)
    slow = [event for event in saves if event.data["seconds"] > limit]
    if slow and len(saves) >= LEAST_SAVES:
        why = f"a save took {slow[0].data['seconds']:.2f} s"
        yield _made(scene, slow[0].time_ns, _Reading(CauseClass.STORAGE, why))


def _control(scene: Scene) -> Iterator[DiagnosedIncident]:
    """A supervisor that was replaced, and a key-value store that is slow or was lost."""
    troubles = [
        (event, f"another supervisor took over after {event.data['down_s']:.2f} s")
        for event in scene.log.of(Kind.COORDINATOR_ADOPTED)
    ]
    for event, why in [*troubles, *_troubled_formations(scene.log)]:
        yield _made(scene, event.time_ns, _Reading(CauseClass.COORDINATOR, why))


def _troubled_formations(log: Log) -> Iterator[tuple[Event, str]]:
    """The first group that took long to form where no failure of the connections came before; else
    generations that were started and never ready, without a failure in between.
    """
    formed = list(log.of(Kind.GROUP_FORMED))
    usual = min((event.data["seconds"] for event in formed), default=0.0)
    stuck = [e.time_ns for e in log.of(Kind.FAILURE_DETECTED) if e.data["process"] is None]
    for event in formed:
        slow = event.data["seconds"] > usual + SLOW_FORMING_S
        if slow and not any(time_ns <= event.time_ns for time_ns in stuck):
            yield event, f"a group took {event.data['seconds']:.2f} s to form"
            return
    pending: Event | None = None
    for event in log.by(ORCHESTRATOR) if formed else ():
        if event.kind is Kind.GENERATION_STARTED:
            if pending is not None:
                yield pending, "a group had to be formed again, and no process had failed"
            pending = event
        elif event.kind in (Kind.GENERATION_READY, Kind.FAILURE_DETECTED):
            pending = None


def _slow(scene: Scene, known: Sequence[DiagnosedIncident]) -> Iterator[DiagnosedIncident]:
    """Slowness that no failure and no storage explains."""
    explained = any(one.cause in (CauseClass.STORAGE, CauseClass.LINK) for one in known)
    for one in slownesses(scene.log):
        step = f"from step {one.step} on"
        if not one.ranks:
            said = _Reading(CauseClass.LINK, f"collectives took long for all ranks {step}")
            if not explained:
                yield _made(scene, one.time_ns, said)
            continue
        said = _Reading(CauseClass.DATA, f"waits for data long {step}")
        if one.what == "compute":
            said = _Reading(CauseClass.SLOWNESS, f"computes long {step}")
        node = scene.node_of_all(one.ranks, one.time_ns)
        if node is not None:
            yield _made(scene, one.time_ns, said, node=node)
            continue
        for rank in one.ranks:
            yield _made(scene, one.time_ns, said, rank=rank)
