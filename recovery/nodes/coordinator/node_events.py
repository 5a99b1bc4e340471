"""Turns what happens to nodes into events of the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.health.signs import Sign
from trainchaos.recovery.health.signs import event_of as sign_event
from trainchaos.recovery.nodes.coordinator.node_state import (
    ClockMeasured,
    NodeChecked,
    NodeEvent,
    NodeFound,
    NodeInfo,
    NodeJoined,
    NodeLost,
    NodeWarned,
    NotKept,
)
from trainchaos.recovery.nodes.link import protocol

EventData = tuple[Kind, Mapping[str, Any]]


def event_of(event: NodeEvent) -> EventData | None:
    """Kind and data of the event; None for what ranks log themselves."""
    match event:
        case NodeJoined():
            return _joined(event.info)
        case NodeLost():
            taken_away = {"taken_away": True} if event.taken_away else {}
            return Kind.NODE_LOST, {"node": event.node, "why": event.why, **taken_away}
        case ClockMeasured():
            return _measured(event.node, event.offset_ns, event.bound_ns)
        case NodeFound():
            return sign_event(event.sign)
        case NotKept():
            return not_kept(event.file, event.bytes, event.why)
    return None


def told_of(
    node: int, frame: protocol.Warned | protocol.Found | protocol.Checked
) -> Sequence[NodeEvent]:
    """What an agent says of its own node: of no other, and of no rank."""
    match frame:
        case protocol.Warned():
            return [NodeWarned(node=node)]
        case protocol.Checked(device=device, fit=fit, said=said):
            return [NodeChecked(node=node, device=device, fit=fit, said=said)]
    own = {"node": node, "rank": None}
    signs: tuple[Sign, ...] = (*frame.reports, *frame.alarms)
    return [NodeFound(node=node, sign=sign.model_copy(update=own)) for sign in signs]


def clock_of(info: NodeInfo) -> list[EventData]:
    """The event for the current offset of a node's clock, if it is known."""
    if info.offset_ns is None or info.bound_ns is None:
        return []
    return [_measured(info.node, info.offset_ns, info.bound_ns)]


def all_of(info: NodeInfo) -> list[EventData]:
    """The events for a node that has joined, and what is known of its clock."""
    return [_joined(info), *clock_of(info)]


def not_kept(file: str, size: int, why: str) -> EventData:
    """The event for bytes of a file that were dropped."""
    return Kind.FILES_DROPPED, {"files": [file], "bytes": size, "why": why}


def _joined(info: NodeInfo) -> EventData:
    return Kind.NODE_JOINED, {
        "node": info.node,
        "host": info.host,
        "boot": info.boot,
        "address": info.address,
        "devices": list(info.devices),
    }


def _measured(node: int, offset_ns: int, bound_ns: int) -> EventData:
    return Kind.CLOCK_MEASURED, {"node": node, "offset_ns": offset_ns, "bound_ns": bound_ns}
