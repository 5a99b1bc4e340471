"""A process for tests of nodes: obeys orders as a rank does, logs events, marks progress;
no torch.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from trainchaos.chaos.events.log import EventWriter, Kind
from trainchaos.recovery.process.entry import Birth, live
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.progress_counters import COLLECTIVE, MarkPage
from trainchaos.recovery.transport.wire import Extra, Ready, Stop


class TinyConfig(Birth):
    """What a tiny rank is told."""


def obey(channel: Channel, page: MarkPage, writer: EventWriter, order: dict[str, Any]) -> None:
    """Do what a test wants."""
    count = int(order.get("count", 1))
    match order["do"]:
        case "say":
            for number in range(count):
                channel.send(Extra(topic="said", payload={"number": number}))
        case "step":
            page.begin(1, count)
            page.enter(COLLECTIVE)
            page.commit(count)
            channel.send(Extra(topic="stepped", payload={"step": count}))
        case "log":
            for number in range(count):
                page.wrote(writer.write(Kind.BATCH_TAKEN, rank=0, epoch=0, samples=[number]).seq)
            channel.send(Extra(topic="logged", payload={}))
        case "print":
            print("x" * 99, *range(count), sep="\n", flush=True)
            os.write(1, b"\xff\xfe\n")
        case "orphan":  # whose parent ends at once
            read, write = os.pipe()
            first = os.fork()
            if first == 0:
                if (second := os.fork()) == 0:
                    os._exit(0)
                os.write(write, str(second).encode())
                os._exit(0)
            os.waitpid(first, 0)
            channel.send(Extra(topic="orphan", payload={"pid": int(os.read(read, 32))}))
        case "exit":
            os._exit(count)


def train(channel: Channel, page: MarkPage, writer: EventWriter) -> None:
    """Until told to stop."""
    channel.send(Ready(versions={"tiny": "1"}))
    while (messages := channel.receive()) is not None:
        for message in messages:
            if isinstance(message, Stop):
                return
            if isinstance(message, Extra):
                obey(channel, page, writer, message.payload)
    os._exit(70)


def start(config: bytes, control_fd: int, mark_fd: int) -> NoReturn:
    """A fork becomes a tiny rank."""
    live(TinyConfig.model_validate_json(config), control_fd, mark_fd, train)


def main() -> NoReturn:
    """Cold."""
    control_fd, mark_fd, config_fd = (int(value) for value in sys.argv[1:4])
    with os.fdopen(config_fd, "rb") as stream:
        start(stream.read(), control_fd, mark_fd)


if __name__ == "__main__":
    main()
