"""Values of ``recovery.run``'s options, as argparse reads them."""

from __future__ import annotations

import argparse

from trainchaos.chaos.errors import ScenarioError
from trainchaos.recovery.nodes.serve import address_of
from trainchaos.recovery.policy.interval import parse


def count(text: str) -> int:
    """A whole number, 0 or more. Raises ValueError, ArgumentTypeError."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def seconds(text: str) -> float:
    """A time to wait, more than 0 seconds. Raises ValueError, ArgumentTypeError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time to wait: use seconds, more than 0")
    return value


def room(text: str) -> float:
    """A size limit, more than 0. Raises ValueError, ArgumentTypeError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text} is no room for anything: use a number, more than 0"
        )
    return value


def positive(text: str) -> int:
    """A whole number, 1 or more. Raises ValueError, ArgumentTypeError."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def listen(text: str) -> tuple[str, int]:
    """An address HOST:PORT. Raises ArgumentTypeError."""
    try:
        return address_of(text)
    except ScenarioError as error:
        raise argparse.ArgumentTypeError(error.message) from error


def interval(text: str) -> int | str:
    """Between checkpoints: steps, a time or ``auto``. Raises ArgumentTypeError."""
    every = int(text) if text.lstrip("-").isdigit() else text
    try:
        parse(every)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return every
