"""What a check of one place is: a function that measures in a process of its own, and a pure
judgement over what it measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainchaos.harness.preflight.checks.findings import Finding, Rate

Measured = Mapping[str, Any]
"""JSON, as it travels from the process that measures."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a check is to measure. ``place``: ``cpu:2``, ``cuda:0`` or ``host``; ``budget_s``:
    seconds after which it begins nothing more; ``directory``: of the disk to be measured.
    """

    place: str
    budget_s: float
    seed: int = 0
    directory: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


class Check(Protocol):
    """One check of one place."""

    @property
    def name(self) -> str:
        """For people, and for the process that measures."""

    def measure(self, task: Task) -> Measured:
        """Measure, in at most about ``task.budget_s`` seconds. Raises RuntimeError or OSError where
        the device fails.
        """

    def judge(self, place: str, measured: Measured) -> Finding:
        """What that alone says of the place. Pure."""

    def rates(self, place: str, measured: Measured) -> Sequence[Rate]:
        """What is to be compared with others of it. Pure."""


def torch_name(place: str) -> str:
    """Torch's name of a place: all places ``cpu:N`` and ``host`` are its ``cpu``."""
    return place if place.startswith("cuda") else "cpu"


def is_cuda(place: str) -> bool:
    """Whether it is an NVIDIA device."""
    return place.startswith("cuda")
