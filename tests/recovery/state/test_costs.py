"""What is done while a job recovers, or in each step, is no more than has to be: counted, not
timed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recovery.state.test_optimizers import Relay, everything, make, train
from trainchaos.recovery.checkpoint import saves
from trainchaos.recovery.checkpoint.files import checkpoints, retention
from trainchaos.recovery.checkpoint.files.checkpoints import MANIFEST
from trainchaos.recovery.collectives.transfer import copy_state
from trainchaos.recovery.state import fingerprint
from trainchaos.recovery.state.digest import array_of, bytes_of, own_memory


def tensors() -> list[Tensor]:
    wide = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    every = [
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0),
        wide,
        wide[1:],
        wide.T,
        wide[:, ::2],
        wide.double(),
        torch.arange(13, dtype=torch.uint8),
        torch.arange(13, dtype=torch.uint8)[3:],
        torch.tensor([True, False]),
        torch.full((9,), 2**63 - 1),
        torch.full((3,), -1, dtype=torch.int32),
        wide.half(),
        wide.bfloat16(),
        torch.complex(wide, wide),
    ]
    return every


def raw(tensor: Tensor) -> bytes:
    return (
        tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    )


@pytest.mark.parametrize("tensor", tensors(), ids=lambda t: f"{str(t.dtype)[6:]} {tuple(t.shape)}")
def test_bytes_read_and_summed_in_place_are_the_same_as_torch_has_them(tensor: Tensor) -> None:
    assert bytes(bytes_of(tensor)) == raw(tensor)
    own, array = own_memory(tensor), array_of(tensor)
    assert (own is None) == (array is None)
    if own is not None and array is not None:
        assert bytes(own) == raw(tensor)
        assert fingerprint._sum_of(array, lambda: None) == fingerprint._sum(tensor).item()
        if len(own):
            own[:1] = b"\x5a"
            assert raw(tensor)[0] == 0x5A, "written where the tensor is"
    assert (
        own is not None
        or tensor.dtype not in (torch.float32, torch.int64)
        or not tensor.is_contiguous()
    )


def test_whoever_passes_on_a_state_that_has_more_than_its_own_makes_room_for_all_of_it() -> None:
    # no slots here yet
    source, other, sent = train(make("AdamW"), 2), make("AdamW"), list[Tensor]()
    copy_state(source, Relay(sent, 0), source=0, receive=False, progress=lambda: None)
    before = everything(other)
    copy_state(other, Relay(sent, 1), source=0, receive=False, progress=lambda: None)
    assert not sent
    assert everything(other) == before


def test_slots_are_described_anew_only_where_their_form_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = train(make("AdamW"), 1)
    before = state.rules_of_optimizer(), state.scalars()
    described: list[str] = []
    put = type(state._slots)._put
    monkeypatch.setattr(
        type(state._slots),
        "_put",
        lambda self, t, path: described.append(path) or put(self, t, path),
    )
    assert (state.rules_of_optimizer(), state.scalars()) == before
    assert not described
    parameter, *_ = state.model.parameters()
    slots: Any = state.optimizer.state[parameter]
    slots["exp_avg"] = slots["exp_avg"].double()
    assert state.rules_of_optimizer() != before[0]
    assert state.scalars()["optimizer"]["state"]["0.weight"]["exp_avg"] == {
        "!tensor": ["float64", [6, 4]]
    }
    slots["more"] = 1.5
    assert state.scalars()["optimizer"]["state"]["0.weight"]["more"] == 1.5


def test_a_manifest_is_encoded_once_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = train(make("AdamW"), 1)
    saved = [saves.save(state, tmp_path, generation=1)[0]]
    raw = (saved[0].path / MANIFEST).read_bytes()
    manifest = json.loads(raw)
    assert raw == json.dumps({key: manifest[key] for key in sorted(manifest)}).encode()
    assert raw == checkpoints.sealed(manifest)
    saved.append(saves.save(train(state, 1), tmp_path, generation=2)[0])
    assert not retention.prune(tmp_path, 2).gone
    assert [c.step for c in checkpoints.newest_first(tmp_path)] == [2, 1]
    with monkeypatch.context() as patch:
        patch.setattr("json.loads", lambda _: pytest.fail("a manifest was read again"))
        assert [c.step for c in checkpoints.newest_first(tmp_path)] == [2, 1]
        assert [checkpoints.needed_by(checkpoint) for checkpoint in saved] == [{""}, {""}]
    other = json.dumps({**manifest, "generation": 3}, sort_keys=True)
    (saved[0].path / MANIFEST).write_text(other)
    assert [c.step for c in checkpoints.newest_first(tmp_path)] == [1, 2], (
        "it is read again when it is another"
    )
    with pytest.raises(checkpoints.CorruptCheckpoint, match="its own checksum"):
        checkpoints.manifest_of(saved[0])
