"""Whether an occurrence of a fault acted on the planned target, at the planned step and phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence
from trainchaos.harness.judge.record.history import Generation, History

SAVER = 0  # the rank whose next save is hit if the plan names no rank
NEWEST_S = 1.0  # a checkpoint committed so shortly before the act may not be found as the newest
_GONE = (Kind.CHECKPOINT_DELETED, Kind.CHECKPOINT_SET_ASIDE, Kind.CHECKPOINT_REFUSED)
_ON_DISK = (*_GONE, Kind.CHECKPOINT_COMMITTED, Kind.FAULT_INJECTED)
_WHO = ("ranks", "spares", "nodes", "links")
_Facts = Mapping[str, Any]


def aimed(evidence: Evidence, event: Event, planned: _Facts, *, missed: bool) -> Iterator[str]:
    """Deviations of an injection from the ranks, spares, nodes, links, checkpoint and steps of its
    plan. ``missed``: it failed, so it may have found no target.
    """
    history, name, target = evidence.history, event.data["fault"], event.data["target"] or {}
    yield from _when(history, event, planned)
    due = {key: [*planned["target"][key], *_of_each(planned, key)] for key in _WHO}
    yield from _rank(history, event, planned, due["ranks"])
    yield from _process(history, event, due["spares"])
    nodes = target.get("nodes", [target["node"]] if target.get("node") is not None else [])
    yield from _others(name, "node", nodes, due["nodes"])
    yield from _others(name, "link", target.get("links", []), due["links"])
    if due["nodes"] and not nodes and not missed:
        yield f"{name} hit no node, planned is {_list(due['nodes'])}"
    yield from _on_nodes(history, event, nodes)
    if not missed and not history.info.observed:
        yield from _checkpoint(evidence, event, planned["target"]["checkpoint"])


def _of_each(planned: _Facts, key: str) -> Iterator[Any]:
    return (one for targets in planned["target"]["each"] for one in targets[key])


def _list(values: Iterable[Any]) -> str:
    return ", ".join(sorted({str(value) for value in values}))


def _others(name: str, what: str, hit: Iterable[Any], due: list[Any]) -> Iterator[str]:
    yield from (
        f"{name} hit {what} {one}, planned is {_list(due)}" for one in hit if one not in due
    )


def _when(history: History, event: Event, planned: _Facts) -> Iterator[str]:
    points, target = planned["at"]["points"], event.data["target"] or {}
    saved = (
        target.get("checkpoint") is not None and not history.info.observed
    )  # the event's step is that of the checkpoint that was hit
    if not points or event.step is None or saved:
        return
    name, step = event.data["fault"], event.step - event.data.get("late_steps", 0)
    phase = event.data.get("phase")  # older logs have none
    if step not in {point[0] for point in points}:
        yield (
            f"{name} was injected in step {event.step}, planned is"
            f" {_list(point[0] for point in points)}"
        )
    elif phase is not None and [step, phase] not in points:
        due = _list(point[1] for point in points if point[0] == step)
        yield f"{name} was injected in phase {phase} of step {event.step}, planned is {due}"


def _rank(history: History, event: Event, planned: _Facts, ranks: list[int]) -> Iterator[str]:
    """The rank is one of the plan's, and the process held that rank."""
    name, target = event.data["fault"], event.data["target"] or {}
    rank, process = target.get("rank"), target.get("process")
    if rank is None:
        return
    saver = [SAVER] if planned["target"]["checkpoint"] is not None else []
    due = ranks or (saver if process else [])
    if due and rank not in due:
        yield f"{name} hit rank {rank}, planned is {_list(due)}"
    generation = history.generation(event.generation)
    if process is None or generation is None:
        return
    held = _held(history, generation, process)
    if held and rank not in held:
        yield f"{name} hit {process} as rank {rank}, which was rank {_list(held)}"
    elif not held:
        yield (
            f"{name} hit {process} as rank {rank}, which was not a member of generation"
            f" {generation.number}"
        )


def _held(history: History, generation: Generation, process: str) -> set[int]:
    """Ranks that a member may have had. A command's members are in the order of their ranks, with
    gaps for ranks that were lost or never found; each was found with its own rank.
    """
    if process not in generation.members:
        return set()
    place = {generation.members.index(process)}
    if not history.info.observed:
        return place
    found = {
        int(event.data["rank"])
        for event in history.log.of(Kind.PROCESS_SPAWNED)
        if event.data["process"] == process and event.data.get("rank") is not None
    }
    return place | found


def _process(history: History, event: Event, spares: list[int]) -> Iterator[str]:
    """Processes hit as a spare, as an end of a link or with all ranks had that role in this
    generation.
    """
    name, target = event.data["fault"], event.data["target"] or {}
    generation = history.generation(event.generation)
    members = generation.members if generation is not None else ()
    process, several = target.get("process"), target.get("processes")
    if process is not None and target.get("rank") is None and not spares:
        yield f"{name} hit {process}, which held no rank, and is planned for no spare"
    if isinstance(several, dict) and not history.info.observed:
        for rank, who in several.items():
            if members and members[int(rank) : int(rank) + 1] != (who,):
                yield f"{name} hit {who} as rank {rank}, which it was not"
    elif isinstance(several, list) and target.get("everywhere"):
        yield from (
            f"{name} hit {who}, which was no rank"
            for who in several
            if members and who not in members
        )


def _on_nodes(history: History, event: Event, nodes: list[int]) -> Iterator[str]:
    """Processes hit along with nodes were started on those nodes."""
    several = (event.data["target"] or {}).get("processes")
    if not nodes or not isinstance(several, list):
        return
    homes = {e.data["process"]: e.data.get("node") for e in history.log.of(Kind.PROCESS_SPAWNED)}
    for process in several:
        if homes.get(process) is not None and homes[process] not in nodes:
            name = event.data["fault"]
            yield (
                f"{name} hit {process} with node {_list(nodes)}, which was on node {homes[process]}"
            )


def _checkpoint(evidence: Evidence, event: Event, due: str | int | None) -> Iterator[str]:
    """The checkpoint of the planned step was hit; or, for "latest", no checkpoint that must have
    existed, and is not known to be gone, has a later step.
    """
    log, name = evidence.log, event.data["fault"]
    hit = (event.data["target"] or {}).get("checkpoint")
    if hit is None or due is None:
        return
    if due != "latest":
        if event.step != due:
            yield f"{name} hit {hit}, planned is the checkpoint of step {due}"
        return
    spec = evidence.cell.scenario.workload.checkpoint
    still = "phase" in event.data and spec.mode == "sync"  # all ranks hold, so no save is running
    far = log.first(Kind.NODE_JOINED) is not None or spec.memory
    seen_ns = event.time_ns - (0 if still else int(NEWEST_S * 1e9))
    there = {} if far else _on_disk(log.of(*_ON_DISK), seen_ns, event.time_ns)
    newer = [other for other, step in there.items() if step > (event.step or 0)]
    if newer:
        yield f"{name} hit {hit}, and {newer[-1]} was newer"


def _on_disk(events: Iterable[Event], seen_ns: int, until_ns: int) -> dict[str, int]:
    """Checkpoints that must exist on disk at a time -> step: those there at ``seen_ns``, and not
    gone before ``until_ns``.
    """
    there: dict[str, int] = {}
    for event in events:
        if event.time_ns >= until_ns:
            break
        if event.kind is Kind.CHECKPOINT_COMMITTED:
            if event.time_ns < seen_ns:
                there[event.data["checkpoint"]] = event.step or 0
        elif event.kind in _GONE:
            there.pop(event.data["checkpoint"], None)
        elif event.kind is Kind.FAULT_INJECTED and _hits_files(event):
            there.clear()  # what the fault left is unknown
    return there


def _hits_files(event: Event) -> bool:
    target = event.data["target"] or {}
    return "checkpoint" in target or "storage" in target or "checkpoint" in event.data["kind"]
