"""Which places of a job are tainted, by the names that its nodes go by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import EXIT_SKIPPED, ChaosError
from trainchaos.recovery.health.taint import Taint
from trainchaos.recovery.health.taints import TaintList, taints_path


class TooFewPlaces(ChaosError):
    """Without the tainted places, the job's processes have no place: nothing was started."""

    exit_code = EXIT_SKIPPED


WHAT_TO_DO = (
    "add healthy nodes or devices, start fewer processes, or 'chaos taint clear' what is repaired"
)


def taints_now(given: Path | None = None) -> tuple[Taint, ...]:
    """The taints that hold now: of the file ``given``, which then has to exist, or the default one.
    Raises TaintError, NewerVersion.
    """
    known = TaintList(taints_path(given), needed=given is not None)
    return known.active(datetime.now(UTC))


def names_of(hosts: Mapping[int, str], *, emulated: bool = False) -> dict[int, tuple[str, ...]]:
    """The names by which a taint may mean each node: that of its host, and its number if the host
    does not tell it from another node. ``emulated``: several nodes of this machine may have names
    of their own, such as containers.
    """
    shared = emulated and len(hosts) > 1
    several = {host for host, count in Counter(hosts.values()).items() if count > 1}
    return {
        node: (host, str(node)) if shared or host in several else (host,)
        for node, host in hosts.items()
    }


def against(
    taints: Sequence[Taint], names: Collection[str], device: str | None = None
) -> tuple[Taint, ...]:
    """The taints of a node with these names; with a ``device`` (as torch names it), of the node or
    that device.
    """
    return tuple(taint for taint in taints if _meant(taint, names, device))


def about(taints: Sequence[Taint]) -> list[dict[str, Any]]:
    """Taints as an event's data has them."""
    return [
        {
            "place": each.place,
            "by": each.by,
            "reason": each.reason,
            "since": each.as_data()["since"],
        }
        for each in taints
    ]


def listed(taints: Sequence[Taint]) -> str:
    """Taints for people: each place with its reason."""
    return "; ".join(f"{each.place} ({each.reason})" for each in taints)


def _meant(taint: Taint, names: Collection[str], device: str | None) -> bool:
    if taint.node is not None:
        return any(same_host(taint.node, name) for name in names)
    host, _, its = (taint.device or "").partition("/")
    return its == device and any(same_host(host, name) for name in names)


def same_host(one: str, other: str) -> bool:
    """Whether two names mean one host: equal without regard to case (RFC 4343), or one of them is
    the other without its domain. Numbers and addresses have no domain.
    """
    one, other = one.lower(), other.lower()
    (head, dot, _), (head_2, dot_2, _) = one.partition("."), other.partition(".")
    if one == other or head.isdecimal() or head_2.isdecimal():
        return one == other
    return head == head_2 and bool(dot) != bool(dot_2)
