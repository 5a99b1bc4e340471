"""How an agent is configured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainchaos.recovery.process.forkserver import LaunchRecipe

LEASE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Configuration of an agent. ``coordinator``: its address; ``address``: of this node, "": the
    one from which it reaches the coordinator; ``scratch``: directory for event logs and outputs;
    ``lease_s``: how long it continues without a coordinator; ``devices``: as torch names them;
    ``coordinator_boot``: boot id of its machine: if it is this machine's too, memory that ranks
    share with their agent lies in files, so that nothing they wrote is lost with the node;
    ``reports``: a file to which monitors of the node append health reports; ``check``: the program
    that finds out whether a place is fit (``recovery.health.care.place_check.PlaceChecks``).
    """

    coordinator: tuple[str, int]
    node: int
    address: str
    token: bytes
    scratch: Path
    recipe: LaunchRecipe
    lease_s: float = LEASE_S
    coordinator_boot: str = ""
    devices: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    reports: Path | None = None
    check: Sequence[str] = ()
