"""A message to many processes, sent to one of this machine."""

from __future__ import annotations

import pytest

from trainchaos.recovery.process.local import Children
from trainchaos.recovery.transport.wire import Join, Message


def test_each_process_gets_its_own_fields_of_a_message_to_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Child:
        """A process with an open channel, which notes what is sent."""

        def __init__(self) -> None:
            self.got: list[Message] = []
            self.channel = self

        def send(self, message: Message) -> bool:
            self.got.append(message)
            return True

    children = Children()
    people = {f"w{rank}": Child() for rank in range(3)}
    monkeypatch.setattr(children, "_children", dict(people))
    common = Join(generation=2, rank=0, world=3, store_port=1, restore=False, timeout_s=60.0)
    for rank, name in enumerate(people):
        assert children.send(name, common, {"rank": rank})
    assert children.send("w0", common)
    assert not children.send("gone", common, {"rank": 3})
    assert [[message.rank for message in child.got] for child in people.values()] == [  # type: ignore[attr-defined]
        [0, 0],
        [1],
        [2],
    ]
    assert people["w2"].got == [common.model_copy(update={"rank": 2})]
