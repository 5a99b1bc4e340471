"""Turns what happens to nodes into events of the log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.health import signs
from trainchaos.recovery.nodes.coordinator.node_state import (
    ClockMeasured,
    NodeEvent,
    NodeFound,
    NodeInfo,
    NodeJoined,
    NodeLost,
    NotKept,
)

EventData = tuple[Kind, Mapping[str, Any]]


def event_of(event: NodeEvent) -> EventData | None:
    """Kind and data of the event; None for what ranks log themselves."""
    match event:
        case NodeJoined(node=node, info=info):
            known = {"host": info.host, "boot": info.boot, "address": info.address}
            return Kind.NODE_JOINED, {"node": node, **known, "devices": list(info.devices)}
        case NodeLost(node=node, why=why, taken_away=taken_away):
            more = {"taken_away": True} if taken_away else {}
            return Kind.NODE_LOST, {"node": node, "why": why, **more}
        case ClockMeasured(node=node, offset_ns=offset_ns, bound_ns=bound_ns):
            measured = {"offset_ns": offset_ns, "bound_ns": bound_ns}
            return Kind.CLOCK_MEASURED, {"node": node, **measured}
        case NodeFound(sign=sign):
            return signs.event_of(sign)
        case NotKept(file=file, bytes=size, why=why):
            return Kind.FILES_DROPPED, {"files": [file], "bytes": size, "why": why}
    return None


def clock_of(info: NodeInfo) -> list[ClockMeasured]:
    """The current offset of a node's clock, if it is known."""
    if info.offset_ns is None or info.bound_ns is None:
        return []
    return [ClockMeasured(node=info.node, offset_ns=info.offset_ns, bound_ns=info.bound_ns)]
