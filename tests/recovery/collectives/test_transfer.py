"""A state on its way to a peer: in messages of bounded size, after each of which whoever takes part
shows progress.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recovery.checkpoint.memory.test_memory_state import trained
from tests.recovery.checkpoint.test_signs_of_life import STRIDE, Signs
from tests.recovery.state.test_optimizers import Relay
from trainchaos.recovery.checkpoint.chunks import chunks_of
from trainchaos.recovery.collectives import transfer
from trainchaos.recovery.collectives.group import Circle


def test_a_copy_for_a_peer_shows_progress_within_each_tensor_whoever_sends_or_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", STRIDE)
    source, other, sent, signs = (
        trained(2, width=400),
        trained(1, width=400),
        list[torch.Tensor](),
        Signs(),
    )
    largest = max(chunks_of(source.tensors()), key=lambda chunk: chunk.bytes)
    assert largest.bytes > 8 * STRIDE
    # in another order there
    other.model[0].weight.data = other.model[0].weight.data.t().contiguous().t()
    transfer.copy_state(source, Relay(sent, 0), source=0, receive=False, progress=signs)
    messages = sent[2:]  # after what says which form the state has
    assert signs.count == len(messages) and max(message.nbytes for message in messages) <= STRIDE
    signs.count = 0
    transfer.copy_state(other, Relay(sent, 1), source=0, receive=True, progress=signs)
    assert signs.count == len(messages) and not sent
    assert not other.model[0].weight.is_contiguous() and other.digests() == source.digests()


def test_a_part_without_elements_is_copied_too() -> None:
    """As the shard of a tensor that has fewer rows than there are ranks."""
    full, empty = torch.arange(3.0), torch.empty(0, 7)
    to, nothing = torch.zeros(3), torch.empty(0, 7)
    transfer._unpack(transfer._packed([empty, full, empty]), [nothing, to, nothing])
    assert torch.equal(to, full)
    transfer._unpack(transfer._packed([empty]), [nothing])


@pytest.mark.parametrize(
    "shape",
    [
        (),
        (0,),
        (0, 7),
        (1,),
        (1, 1, 3000),
        (5000,),
        (3, 700),
        (3000, 1),
        (2, 3, 999),
        (1, 2, 2, 257),
    ],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_parts_of_messages_cover_a_tensor_once_in_order(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", STRIDE)
    tensor = torch.randint(0, 100, shape).to(dtype)
    parts = [part for chunk in transfer._chunks([tensor]) for part in chunk]
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), tensor.reshape(-1))
    assert all(part.nbytes <= STRIDE for part in parts)
    assert all(one.nbytes + two.nbytes > STRIDE / 2 for one, two in pairwise(parts))


class Late(Circle):
    """A circle of two of which each message arrives when it is waited for. ``sent``: what arrives;
    ``most``: messages under way at once.
    """

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        self.rank, self.backend, self.ranks = rank, "gloo", (0, 1)
        self.sent = sent
        self.under_way: list[Tensor] = []
        self.most = 0

    def start_broadcast(self, tensor: Tensor, source: int) -> Any:
        """Raises AssertionError if its memory is in use by another message."""
        mine = {tensor.untyped_storage().data_ptr()}
        assert not mine & {one.untyped_storage().data_ptr() for one in self.under_way}
        self.under_way.append(tensor)
        self.most = max(self.most, len(self.under_way))
        return tensor

    def wait(self, work: Any) -> None:
        """In order."""
        assert self.under_way.pop(0) is work
        if self.rank == 0:
            self.sent.append(work.clone())
        else:
            work.copy_(self.sent.pop(0))

    def settle(self) -> None:
        """Nothing to do."""


def test_one_message_travels_while_another_is_unpacked_and_neither_uses_the_others_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", STRIDE)
    source, other, sent = trained(2, width=400), trained(1, width=400), list[Tensor]()
    for rank, state in enumerate((source, other)):
        # parts of one tensor lie in one memory: to send them uses it twice, and only reads it
        circle = Late(rank, sent) if rank else Relay(sent, 0)
        transfer.copy_state(state, circle, source=0, receive=rank == 1, progress=lambda: None)
        assert rank == 0 or (isinstance(circle, Late) and circle.most == transfer.UNDER_WAY)
    assert not sent and other.digests() == source.digests()


def test_a_part_that_lies_in_order_is_sent_from_where_it_is() -> None:
    part = torch.arange(12.0).view(3, 4)
    assert transfer._packed([part]).data_ptr() == part.data_ptr()
    assert transfer._packed([part[1:]]).data_ptr() == part[1:].data_ptr()
    turned = transfer._packed([part.t()])
    assert turned.data_ptr() != part.data_ptr()
    assert torch.equal(turned.view(torch.float32).view(4, 3), part.t())
