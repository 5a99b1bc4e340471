"""Messages to and from the link proxy: JSON, one per line."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from trainchaos.chaos.fault.targets import LinkShape

MAX_LINE = 1 << 16

Link = tuple[str, str]
"""Names of the source and the destination process."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Route(_Message):
    """From a rank: route my connection to ``link[1]``, which listens at ``host:port``, through the
    proxy.
    """

    do: Literal["route"] = "route"
    link: Link
    host: str
    port: int = Field(ge=1, le=65535)


class Forward(_Message):
    """From the launcher: open a port and forward every connection made to it to ``host:port``."""

    do: Literal["forward"] = "forward"
    link: Link
    host: str
    port: int = Field(ge=1, le=65535)


class CloseForward(_Message):
    """From the launcher: accept no more connections at this port."""

    do: Literal["close-forward"] = "close-forward"
    port: int


class Routed(_Message):
    """The answer: connect to this port instead."""

    port: int


class SetShape(_Message):
    """Shape these links from now on."""

    do: Literal["shape"] = "shape"
    links: list[Link]
    shape: LinkShape


class Probe(_Message):
    """Measure a link by sending bytes along it. ``number``: repeated in the answer."""

    do: Literal["probe"] = "probe"
    number: int
    link: Link


class Probed(_Message):
    """Measured over the probe's own connections, shaped like the link's. None: nothing arrived in
    time.
    """

    number: int
    round_trip_s: float | None
    mbit_per_s: float | None


class Done(_Message):
    """A shape is in force."""

    do: Literal["done"] = "done"


AnyRequest = Route | Forward | CloseForward | SetShape | Probe
REQUEST: TypeAdapter[AnyRequest] = TypeAdapter(Annotated[AnyRequest, Field(discriminator="do")])


def line(message: _Message) -> bytes:
    """A message in its wire format."""
    return message.model_dump_json().encode() + b"\n"
