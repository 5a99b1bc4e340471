"""Diagnoses a run from its event log alone: what happened, to whom, whose it is, what to do.

Reads a stripped log (``strip``): no event of it says what was injected. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log
from trainchaos.harness.explain.diagnosis import CauseClass, DiagnosedIncident, Layer
from trainchaos.harness.explain.pace import slownesses
from trainchaos.harness.explain.scene import Scene, silence_s
from trainchaos.harness.explain.strip import strip
from trainchaos.recovery.health.credible import failing
from trainchaos.recovery.playbook.book import Playbook
from trainchaos.recovery.playbook.entry import Action, Cause, Entry, Owner

KILL, SEGMENTATION_FAULT = 9, 11
CRASHES = (4, 6, 7, 8, SEGMENTATION_FAULT)
"""Signals that a program's own error ends it by: SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV."""
SLOW_SAVE = 4.0
"""Duration of a save, in medians of those of the run, from which the disk is slow."""
LATE_S = 0.1
"""Seconds above the median from which a save is slow."""
SLOW_FORMING_S = 0.5
"""Seconds above the first formation of a group from which the store is slow, where no connection
was.
"""
ONE_FOR_ALL = "all ranks wait in one collective"
"""Words of the supervisor where nobody is behind."""


def diagnose(log: Log, playbook: Playbook) -> list[DiagnosedIncident]:
    """The incidents of an arm in order of time. Fault events in ``log`` are not looked at."""
    scene = Scene(strip(log))
    found = [*_failures(scene, playbook), *_storage(scene, playbook), *_control(scene)]
    found += _reports(scene, playbook)
    found += _slow(scene, found)
    return _once(sorted(found, key=lambda one: one.at_s))


def _once(found: Sequence[DiagnosedIncident]) -> list[DiagnosedIncident]:
    """Each cause at each place once: what comes again is the same incident."""
    seen: dict[tuple[object, ...], DiagnosedIncident] = {}
    for one in found:
        seen.setdefault((one.cause, one.rank, one.node), one)
    return list(seen.values())


def _made(
    scene: Scene,
    time_ns: float,
    cause: CauseClass,
    layer: Layer,
    action: Action,
    why: str,
    *,
    rank: int | None = None,
    node: int | None = None,
) -> DiagnosedIncident:
    return DiagnosedIncident(
        at_s=max(0.0, round((time_ns - scene.start_ns) / 1e9, 6)),
        cause=cause,
        rank=rank,
        node=node,
        layer=layer,
        action=action,
        why=why,
    )


def _failures(scene: Scene, playbook: Playbook) -> Iterator[DiagnosedIncident]:
    """One incident for each group of failures that were answered together and belong together."""
    for group in scene.failure_groups():
        nodes = scene.nodes_lost(group)
        for node, of_node in nodes.items():
            yield _made(
                scene,
                of_node[0].time_ns,
                CauseClass.NODE_LOSS,
                Layer.HARDWARE,
                Action.RESTART_ELSEWHERE,
                f"all processes of node {node} failed together",
                node=node,
            )
        taken = {event.seq for of_node in nodes.values() for event in of_node}
        for failure in group:
            if failure.seq not in taken and not scene.had_notice(failure):
                yield from _failure(scene, playbook, failure)


def _failure(scene: Scene, playbook: Playbook, failure: Event) -> Iterator[DiagnosedIncident]:
    rank = failure.data["rank"]
    cause, layer, action, why = _read(scene, playbook, failure)
    time_ns = failure.time_ns - 1e9 * silence_s(failure)
    if cause is CauseClass.LINK:
        rank = None
    yield _made(scene, time_ns, cause, layer, action, why, rank=rank)


_Reading = tuple[CauseClass, Layer, Action, str]


def _read(scene: Scene, playbook: Playbook, failure: Event) -> _Reading:
    """What one declared failure means."""
    data = failure.data
    detail = str(data["detail"])
    match data["cause"]:
        case "exit" | "start-timeout":
            return _exit(scene, playbook, failure)
        case "hang":
            return _hang(scene, failure)
        case "nonfinite":
            if scene.skipped_after(failure):
                why = "the samples that made it were found and left out"
                return CauseClass.DATA, Layer.APPLICATION, Action.FIX_CODE, why
            return CauseClass.NONFINITE, Layer.APPLICATION, Action.OLDER_CHECKPOINT, detail
        case "diverged":
            return CauseClass.SILENT_CORRUPTION, Layer.HARDWARE, Action.CHECK_HARDWARE, detail
        case "notice":
            return CauseClass.PREEMPTION, Layer.SYSTEM, Action.RESTART_ELSEWHERE, detail
        case "warning":
            entry = _warned(playbook, scene, failure)
            action = entry.action if entry else Action.CHECK_HARDWARE
            return CauseClass.DEVICE, Layer.HARDWARE, action, detail
        case "error" if data["process"] is None and scene.all_worked_on(failure):
            why = "all ranks went on while one was taken to wait"
            return CauseClass.FALSE_ALARM, Layer.SYSTEM, Action.WATCH, why
        case "error" if data["process"] is None or ONE_FOR_ALL in detail:
            return CauseClass.LINK, Layer.NETWORK, Action.CHECK_HARDWARE, detail
    error = scene.last_error(data["process"], failure.time_ns)
    if error is not None:
        return _error(playbook, error)
    return CauseClass.CODE, Layer.APPLICATION, Action.RESTART, detail


def _hang(scene: Scene, failure: Event) -> _Reading:
    detail = str(failure.data["detail"])
    if scene.worked_on(failure):
        why = "its own log shows that it went on while it was taken for silent"
        return CauseClass.FALSE_ALARM, Layer.SYSTEM, Action.WATCH, why
    if " in data of step" in detail and not failure.data.get("stopped"):
        return CauseClass.DATA, Layer.STORAGE, Action.RESTART, detail
    return CauseClass.HANG, Layer.APPLICATION, Action.RESTART, detail


def _exit(scene: Scene, playbook: Playbook, failure: Event) -> _Reading:
    ended = scene.exit_of(failure.data["process"])
    error = scene.last_error(failure.data["process"], failure.time_ns)
    if ended is not None and ended.data["signal"] is None and error is not None:
        return _error(playbook, error)
    signal = ended.data["signal"] if ended is not None else None
    detail = str(failure.data["detail"])
    if signal in CRASHES:
        entry = playbook.by_signal(signal)
        action = entry.action if entry else Action.RESTART
        return CauseClass.CODE, Layer.APPLICATION, action, detail
    if signal == KILL and (device := scene.device_left(ended)):
        why = f"killed, and {device} took no process any more"
        return CauseClass.DEVICE, Layer.HARDWARE, Action.DRAIN_NODE, why
    if signal == KILL and (checkpoint := scene.saving(ended)):
        why = f"killed while it saved {checkpoint}"
        return CauseClass.PROCESS_DEATH, Layer.SYSTEM, Action.RESTART, why
    if signal is not None:
        return CauseClass.PROCESS_DEATH, Layer.SYSTEM, Action.RESTART, detail
    return CauseClass.CODE, Layer.APPLICATION, Action.RESTART, detail


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


def _error(playbook: Playbook, error: Event) -> _Reading:
    """What an error's type and text mean."""
    kind, message = str(error.data["type"]), str(error.data["message"])
    text = f"{kind}: {message}"
    if "OutOfMemory" in kind:
        return CauseClass.MEMORY, Layer.APPLICATION, Action.FIX_CONFIGURATION, text
    if "Device" in kind or "CUDA error" in message:
        return CauseClass.DEVICE, Layer.HARDWARE, Action.RESTART, text
    for match in playbook.match_text(text.splitlines()):
        if match.entry.cause in _BY_ENTRY:
            cause, layer = _BY_ENTRY[match.entry.cause]
            return cause, layer, match.entry.action, text
    return CauseClass.CODE, Layer.APPLICATION, Action.FIX_CODE, text


def _warned(playbook: Playbook, scene: Scene, failure: Event) -> Entry | None:
    reports = [e for e in scene.log.of(Kind.HEALTH_REPORTED) if e.time_ns <= failure.time_ns]
    return _entry(playbook, reports[-1].data) if reports else None


def _entry(playbook: Playbook, report: Mapping[str, Any]) -> Entry | None:
    number = {"xid": report["code"], "ecc": 48}.get(str(report["what"]))
    return playbook.by_xid(number) if type(number) is int else None


def _reports(scene: Scene, playbook: Playbook) -> Iterator[DiagnosedIncident]:
    """Reports of the health source; those that announce a failure were declared one, unless it
    was too late.
    """
    for event in scene.log.of(Kind.HEALTH_REPORTED):
        what, code, rank = str(event.data["what"]), event.data["code"], event.data["rank"]
        entry = _entry(playbook, event.data)
        fails = type(code) is int and bool(failing(what, code))
        action = entry.action if entry and (fails or entry.owner is not Owner.HARDWARE) else None
        yield _made(
            scene,
            event.time_ns,
            CauseClass.DEVICE,
            Layer.HARDWARE,
            action or Action.WATCH,
            f"the health source reported {what} {code}",
            rank=rank,
            node=event.data["node"] if rank is None else None,
        )


def _storage(scene: Scene, playbook: Playbook) -> Iterator[DiagnosedIncident]:
    """Saves that failed or were slow, and checkpoints that were refused."""
    for event in scene.log.of(Kind.CHECKPOINT_FAILED):
        text = str(event.data["error"])
        found = playbook.match_text(text.splitlines())
        entry = next((m.entry for m in found if m.entry.cause is Cause.STORAGE), None)
        action = entry.action if entry else Action.WATCH
        yield _made(scene, event.time_ns, CauseClass.STORAGE, Layer.STORAGE, action, text)
    for event in scene.log.of(Kind.CHECKPOINT_REFUSED):
        why = f"refused: {event.data['reason']}"
        action = Action.OLDER_CHECKPOINT
        yield _made(scene, event.time_ns, CauseClass.STORAGE, Layer.STORAGE, action, why)
    slow = scene.slow_saves(SLOW_SAVE, LATE_S)
    if slow:
        why = f"a save took {slow[0].data['seconds']:.2f} s"
        yield _made(scene, slow[0].time_ns, CauseClass.STORAGE, Layer.STORAGE, Action.WATCH, why)


def _control(scene: Scene) -> Iterator[DiagnosedIncident]:
    """A supervisor that was replaced, and a key-value store that is slow or was lost."""
    for event in scene.log.of(Kind.COORDINATOR_ADOPTED):
        why = f"another supervisor took over after {event.data['down_s']:.2f} s"
        yield _made(scene, event.time_ns, CauseClass.COORDINATOR, Layer.SYSTEM, Action.WATCH, why)
    for event, why in scene.troubled_formations(SLOW_FORMING_S):
        yield _made(scene, event.time_ns, CauseClass.COORDINATOR, Layer.SYSTEM, Action.WATCH, why)


def _slow(scene: Scene, known: Sequence[DiagnosedIncident]) -> Iterator[DiagnosedIncident]:
    """Slowness that no failure and no storage explains."""
    disk = any(one.cause is CauseClass.STORAGE for one in known)
    for one in slownesses(scene.log):
        step = f"from step {one.step} on"
        if one.what in ("collective", "pause"):
            if not disk and not any(k.cause is CauseClass.LINK for k in known):
                yield _made(
                    scene,
                    one.time_ns,
                    CauseClass.LINK,
                    Layer.NETWORK,
                    Action.CHECK_HARDWARE,
                    f"collectives took long for all ranks {step}",
                )
            continue
        cause = CauseClass.SLOWNESS if one.what == "compute" else CauseClass.DATA
        layer = Layer.SYSTEM if cause is CauseClass.SLOWNESS else Layer.STORAGE
        node = scene.node_of_all(one.ranks, one.time_ns)
        places: list[dict[str, int]] = (
            [{"node": node}] if node is not None else [{"rank": rank} for rank in one.ranks]
        )
        for place in places:
            why = f"{'computes' if one.what == 'compute' else 'waits for data'} long {step}"
            yield _made(scene, one.time_ns, cause, layer, Action.WATCH, why, **place)
