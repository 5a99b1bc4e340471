"""Whether an occurrence of a fault acted on the planned target, at the planned step and phase."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.record.history import Generation, History

SAVER = 0  # the rank whose next save is hit if the plan names no rank
_WHO = ("ranks", "spares", "nodes", "links")
_Facts = Mapping[str, Any]


def aimed(history: History, event: Event, planned: _Facts, *, missed: bool) -> Iterator[str]:
    """Deviations of an injection from the ranks, spares, nodes, links, checkpoint and steps of its
    plan. ``missed``: it failed, so it may have found no target.
    """
    name, target = event.data["fault"], event.data["target"] or {}
    yield from _when(history, event, planned)
    due = {key: [*planned["target"][key], *_of_each(planned, key)] for key in _WHO}
    yield from _rank(history, event, planned, due)
    nodes = target.get("nodes", [target["node"]] if target.get("node") is not None else [])
    yield from _others(name, "node", nodes, due["nodes"])
    yield from _others(name, "link", target.get("links", []), due["links"])
    if due["nodes"] and not nodes and not missed:
        yield f"{name} hit no node, planned is {_list(due['nodes'])}"
    saved = planned["target"]["checkpoint"]
    hit = target.get("checkpoint")
    if hit is not None and saved not in (None, "latest") and event.step != saved and not missed:
        yield f"{name} hit {hit}, planned is the checkpoint of step {saved}"


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
    phase = event.data.get("phase")
    if step not in {point[0] for point in points}:
        yield (
            f"{name} was injected in step {event.step}, planned is"
            f" {_list(point[0] for point in points)}"
        )
    elif phase is not None and [step, phase] not in points:
        due = _list(point[1] for point in points if point[0] == step)
        yield f"{name} was injected in phase {phase} of step {event.step}, planned is {due}"


def _rank(
    history: History, event: Event, planned: _Facts, due: Mapping[str, list[Any]]
) -> Iterator[str]:
    """The rank is one of the plan's, and the process held that rank."""
    name, target = event.data["fault"], event.data["target"] or {}
    rank, process = target.get("rank"), target.get("process")
    if rank is None:
        if process is not None and not due["spares"]:
            yield f"{name} hit {process}, which held no rank, and is planned for no spare"
        return
    saver = [SAVER] if planned["target"]["checkpoint"] is not None else []
    ranks = due["ranks"] or (saver if process else [])
    if ranks and rank not in ranks:
        yield f"{name} hit rank {rank}, planned is {_list(ranks)}"
    generation = history.generation(event.generation)
    if process is not None and generation is not None:
        held = _held(history, generation, process)
        if rank not in held:
            yield f"{name} hit {process} as rank {rank}, which was rank {_list(held) or 'none'}"


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
