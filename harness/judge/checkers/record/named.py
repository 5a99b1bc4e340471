"""Whether alarms name places that the job has, and such as their detector can know."""

from __future__ import annotations

from collections.abc import Iterator

from trainchaos.chaos.events.log import Event, Kind
from trainchaos.harness.judge.evidence.evidence import Evidence

OF_JOB = (
    "hang",
    "straggler",
    "gradient-spike",
    "loss-spike",
    "throughput-drop",
    "digest-mismatch",
)
"""Detectors of what ranks log (``recovery.health.job_watch``): they know of ranks alone."""


def named(evidence: Evidence) -> Iterator[str]:
    """Places of alarms that contradict the job."""
    log, ranks = evidence.log, evidence.history.info.ranks
    spawned = [event.data for event in log.of(Kind.PROCESS_SPAWNED)]
    reported = [event.data for event in log.of(Kind.HEALTH_REPORTED)]
    joined = [event.data for event in log.of(Kind.NODE_JOINED)]
    nodes = {data.get("node") or 0 for data in (*spawned, *reported, *joined)}
    devices = {data["device"] for data in (*spawned, *reported) if data.get("device")}
    for event in log.of(Kind.HEALTH_ALARM):
        rank, node, device = (event.data.get(key) for key in ("rank", "node", "device"))
        if rank is not None and not (type(rank) is int and 0 <= rank < ranks):
            yield f"{_said(event)} is of rank {rank!r:.40}, and there are {ranks}"
        if event.data["what"] in OF_JOB and not node is device is None:
            yield f"{_said(event)} names a node or device, which its detector does not know"
        elif node is not None and node not in nodes:
            yield f"{_said(event)} is of node {node!r:.40}, which the job does not have"
        elif device is not None and devices and device not in devices and not _gpu(device):
            yield f"{_said(event)} is of device {device!r:.40}, which the job does not have"


def _gpu(device: object) -> bool:
    """Which a node may have and the job not use."""
    return isinstance(device, str) and device.startswith("cuda:")


def _said(event: Event) -> str:
    return f"the alarm {event.data['what']}"
