"""Messages to, or from, several processes of a node in one line: what they have in common is
written, and read, once. Most orders to all ranks of a node are the same, and so are their answers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from trainchaos.recovery.nodes.link.handshake import ProtocolViolation
from trainchaos.recovery.nodes.link.protocol import Bundle
from trainchaos.recovery.transport.wire import ANY_MESSAGE, NOTHING_OWN, Extra, LeaveOut, Message

LONGEST = 1 << 20  # characters in one line, unless one message has more
USUAL = 400  # in a message's own part; only the common part may have more

_LONG = (Extra, LeaveOut)


class Letter(NamedTuple):
    """A message, and the process that it is for or from. ``own``: the fields in which it differs
    from ``message``, which letters to many processes share.
    """

    process: str
    message: Message
    own: Mapping[str, Any] = NOTHING_OWN


def together(letters: Iterable[Letter], kind: type[Bundle]) -> Iterator[Bundle]:
    """Lines for some messages, in their order."""
    for of_kind, group in itertools.groupby(letters, key=_kind):
        people = list(group)
        first = vars(people[0].message)
        differ = _differing(people, first)
        common = {key: value for key, value in first.items() if key not in differ}
        own_keys = [key for key in first if key in differ]
        long = issubclass(of_kind, _LONG)
        each: list[tuple[str, dict[str, Any]]] = []
        length = 0
        for letter in people:
            size = len(letter.message.model_dump_json()) if long else USUAL
            if each and length + size > LONGEST:
                yield kind.model_construct(common=common, each=tuple(each))
                each, length = [], 0
            each.append((letter.process, _part(letter, own_keys) if own_keys else {}))
            length += size
        yield kind.model_construct(common=common, each=tuple(each))


def _kind(letter: Letter) -> type[Message]:
    return type(letter.message)


def _differing(people: Iterable[Letter], first: Mapping[str, Any]) -> set[str]:
    """The fields that are not the same in all of them. ``first``: the message of the first one."""
    differ: set[str] = set()
    for _, message, own in people:
        if own:
            differ.update(own)
        fields = vars(message)
        if fields is not first and fields != first:
            differ.update(key for key, value in fields.items() if value != first[key])
    return differ


def _part(letter: Letter, keys: Sequence[str]) -> dict[str, Any]:
    """The values of these fields in a message, its own among them."""
    own = letter.own
    if len(own) == len(keys):
        return dict(own)
    fields = vars(letter.message)
    return {key: own[key] if key in own else fields[key] for key in keys}


def apart(bundle: Bundle) -> list[tuple[str, Message]]:
    """Process and message of each. Raises ProtocolViolation."""
    messages: list[tuple[str, Message]] = []
    said, message = None, None
    try:
        for process, own in bundle.each:
            if message is None or own != said:
                said, message = own, ANY_MESSAGE.validate_python({**bundle.common, **own})
            messages.append((process, message))
    except ValidationError as error:
        raise ProtocolViolation(
            f"not a message of or for a process: {error.errors()[0]['msg']}"
        ) from error
    return messages
