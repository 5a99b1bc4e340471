"""The words of the playbook: an entry, and the closed vocabularies of its fields."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec


class Cause(StrEnum):
    """What kind of thing failed."""

    DEVICE_MEMORY = "device-memory"
    DEVICE = "device"
    GPU_LINK = "gpu-link"
    BUS = "bus"
    POWER = "power"
    DRIVER = "driver"
    CODE = "code"
    CONFIGURATION = "configuration"
    NUMERICS = "numerics"
    HOST_MEMORY = "host-memory"
    HOST = "host"
    STORAGE = "storage"
    LIMIT = "limit"
    NETWORK = "network"
    PEER = "peer"  # another process of the job
    STOPPED = "stopped"  # somebody or something ended it on purpose
    NONE = "none"
    UNCLEAR = "unclear"


class Owner(StrEnum):
    """Whose it is to repair. ``UNCLEAR``: the sources differ, or do not say."""

    APPLICATION = "application"
    SYSTEM = "system"
    HARDWARE = "hardware"
    UNCLEAR = "unclear"


class Likelihood(StrEnum):
    """How sure the sources are of the owner. ``STATED``: they name it without reserve."""

    STATED = "stated"
    USUALLY = "usually"
    POSSIBLY = "possibly"


class Action(StrEnum):
    """What to do. ``ABOUT`` says each in a sentence."""

    NONE = "none"
    WATCH = "watch"
    RESTART = "restart"
    RESTART_ELSEWHERE = "restart-elsewhere"
    OLDER_CHECKPOINT = "older-checkpoint"
    RESET_DEVICE = "reset-device"
    REBOOT_NODE = "reboot-node"
    DRAIN_NODE = "drain-node"
    CHECK_HARDWARE = "check-hardware"
    REPLACE_HARDWARE = "replace-hardware"
    FIX_CODE = "fix-code"
    FIX_CONFIGURATION = "fix-configuration"
    CONTACT_SUPPORT = "contact-support"
    UNCLEAR = "unclear"


ABOUT = {
    Action.NONE: "nothing has to be done",
    Action.WATCH: "go on, and watch whether it comes again",
    Action.RESTART: "restart what failed; the same node will do",
    Action.RESTART_ELSEWHERE: "restart what failed on another node",
    Action.OLDER_CHECKPOINT: "restart from an older checkpoint",
    Action.RESET_DEVICE: "take the work off the device and reset it",
    Action.REBOOT_NODE: "take the work off the node and restart it",
    Action.DRAIN_NODE: "take the work off the node, and no new work onto it until it is repaired",
    Action.CHECK_HARDWARE: "check seating, cables, power and cooling",
    Action.REPLACE_HARDWARE: "take it out of service and replace it",
    Action.FIX_CODE: "repair the program: a restart meets the same error again",
    Action.FIX_CONFIGURATION: "change the configuration: a restart meets the same error again",
    Action.CONTACT_SUPPORT: "ask the vendor's support",
    Action.UNCLEAR: "the sources name no action that fits every case",
}
"""Each action in words."""
LEAVES_THE_DEVICE = frozenset(
    {Action.RESET_DEVICE, Action.REBOOT_NODE, Action.DRAIN_NODE, Action.REPLACE_HARDWARE}
)
"""Actions that work cannot stay for."""


class Tells(StrEnum):
    """How near to the cause a sign is: what failed itself, a hint of it, or what others feel of
    it.
    """

    CAUSE = "cause"
    HINT = "hint"
    EFFECT = "effect"


class Entry(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"xids": "xid", "sxids": "sxid", "exits": "exit"},
):
    """One sign. One of ``xids``, ``sxids``, ``signal``, ``exits`` and ``pattern`` is given.

    ``move``: credible as a warning, so that work leaves the device at once; ``note``: reserve or
    difference between sources; ``sources``: addresses; ``example``: a line that ``pattern`` finds;
    ``unless``: a line in which this is found too speaks of something else; ``explains``: ids of
    what follows from it, which it comes before whatever that tells; ``orders``: its action is what
    an error of a device beside it needs.
    """

    id: str
    meaning: str
    cause: Cause
    owner: Owner
    likelihood: Likelihood = Likelihood.STATED
    action: Action
    move: bool = False
    tells: Tells = Tells.CAUSE
    sources: tuple[str, ...]
    note: str = ""
    xids: tuple[int, ...] = ()
    sxids: tuple[int, ...] = ()
    signal: str = ""
    exits: tuple[int, ...] = ()
    pattern: re.Pattern[str] | None = None
    example: str = ""
    unless: re.Pattern[str] | None = None
    explains: tuple[str, ...] = ()
    orders: bool = False

    @property
    def signs(self) -> tuple[tuple[str, int | str], ...]:
        """What it is looked up by, but for ``pattern``."""
        numbers = (("xid", self.xids), ("sxid", self.sxids), ("exit", self.exits))
        found = [(kind, number) for kind, each in numbers for number in each]
        return ("id", self.id), *found, *([("signal", self.signal)] if self.signal else [])

    @property
    def matches(self) -> str:
        """What it is found by, for people: ``XID 94``, ``exit code 2``, an expression."""
        for name, numbers in (("XID", self.xids), ("SXid", self.sxids), ("exit code", self.exits)):
            if numbers:
                return f"{name} {', '.join(_ranges(numbers))}"
        return self.signal or (self.pattern.pattern if self.pattern else "")

    def finds(self, line: str) -> bool:
        """Whether the expression finds something in a line. Of two groups named ``low`` and
        ``high``, the number of the first has to be the smaller one.
        """
        found = self.pattern.search(line) if self.pattern else None
        if found is None or "low" not in found.groupdict():
            return found is not None
        return int(found["low"]) < int(found["high"])

    def speaks_of(self, line: str) -> bool:
        """Whether a line that it is found in means it, and nothing else."""
        return self.unless is None or not self.unless.search(line)

    @property
    def blame(self) -> str:
        """The owner in words: ``hardware, usually``."""
        if self.owner is Owner.UNCLEAR or self.likelihood is Likelihood.STATED:
            return self.owner.value
        return f"{self.owner.value}, {self.likelihood.value}"


def _ranges(numbers: tuple[int, ...]) -> list[str]:
    """``1-3, 7`` of 1, 2, 3, 7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [str(low) if low == high else f"{low}-{high}" for low, high in found]
