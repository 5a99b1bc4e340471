"""Messages to and from the link proxy."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.recovery.transport.stream import Message, parser

LONGEST = 1 << 16
Port = Annotated[int, Meta(ge=1, le=65535)]

Link = tuple[str, str]
"""Names of the source and the destination process."""


class Route(Message):
    """Open a port that leads to ``host:port`` along ``link``: for one connection, as a rank asks
    for it, or until it is closed.
    """

    link: Link
    host: str
    port: Port
    stays: bool = False


class CloseRoute(Message):
    """Accept no more connections at the port of a route that stays."""

    port: int


class Routed(Message):
    """The answer: connect to this port instead."""

    port: int


class SetShape(Message):
    """Shape these links from now on."""

    links: list[Link]
    shape: LinkShape


class Probe(Message):
    """Measure a link by sending bytes along it. ``number``: repeated in the answer."""

    number: int
    link: Link


class Probed(Message):
    """Measured over the probe's own connections, shaped like the link's. None: nothing arrived in
    time.
    """

    number: int
    round_trip_s: float | None
    mbit_per_s: float | None


class Done(Message):
    """A shape is in force."""


REQUEST = parser(Route | CloseRoute | SetShape | Probe)
ANSWER = parser(Routed | Probed | Done)
