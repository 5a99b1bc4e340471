"""One place that is not to be used: a node or a device, with the reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError

Source = Literal["person", "preflight", "alarm", "history"]
BY: tuple[str, ...] = get_args(Source)
"""Who taints a place: a person, a check before a job, an alarm of a detector, stored runs."""
MAX_TEXT = 2000
MAX_FACTS = 40
_NODE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_DEVICE = re.compile(r"(cuda|cpu):(0|[1-9][0-9]{0,4})")


class TaintError(ChaosError):
    """A taint, or the list of them, is wrong; nothing was changed."""

    exit_code = EXIT_USAGE


def _time(given: Any) -> Any:
    """A time as the file has it: ISO 8601 with a zone. Anything else that pydantic would take for a
    time, such as a number, is refused. Raises ValueError.
    """
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = datetime.fromisoformat(given)
        except ValueError:
            raise ValueError(f"{given!r} is no time: write 2026-12-01T08:00:00Z") from None
    if not isinstance(given, datetime):
        raise ValueError(f"{given!r} is no time: write 2026-12-01T08:00:00Z")
    if given.tzinfo is None:
        raise ValueError(f"{given.isoformat()} has no time zone: end it with Z, for UTC")
    try:
        return given.astimezone(UTC).replace(microsecond=0)
    except OverflowError:
        raise ValueError(f"{given.isoformat()} is no time of a calendar in UTC") from None


Time = Annotated[datetime, BeforeValidator(_time)]


class Taint(BaseModel):
    """A place that is not to be used. Exactly one of ``node`` (name of the host, or the number of
    an emulated node) and ``device`` (``host-a/cuda:3``); ``since``, ``expiry``: UTC, whole seconds,
    None: until it is cleared; ``evidence``: a text, or a few facts by name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    node: str | None = None
    device: str | None = None
    reason: str = Field(min_length=1, max_length=MAX_TEXT)
    since: Time
    evidence: str | dict[str, str | int | float | bool | None] = ""
    expiry: Time | None = None
    by: Source

    @field_validator("node", mode="before")
    @classmethod
    def _is_number(cls, node: Any) -> Any:
        return str(node) if type(node) is int and node >= 0 else node

    @field_validator("node")
    @classmethod
    def _is_node(cls, node: str | None) -> str | None:
        if node is not None and not _NODE.fullmatch(node):
            raise ValueError(f"{node!r} is no name of a node: host-a, or a number")
        return node

    @field_validator("device")
    @classmethod
    def _is_device(cls, device: str | None) -> str | None:
        host, _, name = (device or "").partition("/")
        if device is not None and not (_NODE.fullmatch(host) and _DEVICE.fullmatch(name)):
            raise ValueError(f"{device!r} is no device of a node: host-a/cuda:3")
        return device

    @field_validator("reason", "evidence")
    @classmethod
    def _is_printable(cls, given: Any) -> Any:
        words = (
            [given]
            if isinstance(given, str)
            else [*given, *(value for value in given.values() if isinstance(value, str))]
        )
        if len(words) > 2 * MAX_FACTS:
            raise ValueError(f"more than {MAX_FACTS} facts")
        for word in words:
            if not word.isprintable() or len(word) > MAX_TEXT:
                raise ValueError(
                    f"{word[:40]!r} has characters that are not printed, or more than"
                    f" {MAX_TEXT} of them"
                )
        return given

    @model_validator(mode="after")
    def _is_one_place(self) -> Taint:
        if (self.node is None) == (self.device is None):
            raise ValueError("name either a node or a device")
        if self.expiry is not None and self.expiry <= self.since:
            raise ValueError(
                f"its expiry, {written(self.expiry)}, is not after its beginning,"
                f" {written(self.since)}"
            )
        return self

    @property
    def place(self) -> str:
        """The node, or the device with its host."""
        return self.node or self.device or ""

    def expired(self, now: datetime) -> bool:
        """Whether it no longer holds at ``now`` (with a time zone)."""
        return self.expiry is not None and self.expiry <= now

    def same_as(self, other: Taint) -> bool:
        """Whether both say the same of a place, whenever it was said."""
        return (self.place, self.reason, self.by, self.evidence, self.expiry) == (
            other.place,
            other.reason,
            other.by,
            other.evidence,
            other.expiry,
        )

    def as_data(self) -> dict[str, Any]:
        """As the file has it; times as ``2026-11-26T08:00:00Z``."""
        where = {"node": self.node} if self.node is not None else {"device": self.device}
        return {
            **where,
            "reason": self.reason,
            "since": written(self.since),
            "expiry": None if self.expiry is None else written(self.expiry),
            "by": self.by,
            "evidence": self.evidence,
        }


def written(when: datetime) -> str:
    """A time as the file has it; ``when`` has a time zone."""
    return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def made(fields: Mapping[str, Any]) -> Taint:
    """A taint of what a person said. Raises TaintError for what is wrong first."""
    try:
        return Taint.model_validate(fields)
    except ValidationError as error:
        raise TaintError(f"this is no taint: {fault_of(error)[1]}") from error


def fault_of(error: ValidationError) -> tuple[str, str]:
    """The field that is wrong first ("": the whole), and what is wrong, for people."""
    # A field that is missing is often one that is misspelt: say the latter.
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    name = str(first["loc"][0]) if first["loc"] else ""
    said = str(first["msg"]).removeprefix("Value error, ")
    return name, f"{name}: {said}" if name else said


def of_place(place: str) -> dict[str, str]:
    """The field of a taint for a place that a person wrote: ``host-a``, ``3`` or ``host-a/cuda:3``.
    Raises TaintError.
    """
    host, slash, device = place.partition("/")
    if _NODE.fullmatch(host) and (_DEVICE.fullmatch(device) if slash else True):
        return {"device" if slash else "node": place}
    raise TaintError(
        f"{place!r} is no place",
        hint="a node is its host's name or its number: host-a; a device: host-a/cuda:3",
    )
