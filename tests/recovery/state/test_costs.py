"""What is done while a job recovers, or in each step, is no more than has to be: counted, not
timed.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.recovery.detection.test_hangs import TICK_S, mark, trained
from tests.recovery.state.test_optimizers import Relay, everything, make, train
from trainchaos.recovery.checkpoint import saves
from trainchaos.recovery.checkpoint.chunks import first_not_finite
from trainchaos.recovery.checkpoint.files import checkpoints, retention
from trainchaos.recovery.checkpoint.files.checkpoints import MANIFEST
from trainchaos.recovery.collectives.transfer import copy_state
from trainchaos.recovery.state import fingerprint, typed
from trainchaos.recovery.state.digest import array_of, bytes_of, own_memory
from trainchaos.recovery.state.state import TrainState


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


def test_whoever_only_passes_a_state_on_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    source, other, sent = train(make("AdamW"), 2), train(make("AdamW"), 2), list[Tensor]()
    copy_state(source, Relay(sent, 0), source=0, receive=False, progress=lambda: None)
    before = everything(other)
    monkeypatch.setattr(TrainState, "planned", lambda *_: pytest.fail("slots were planned"))
    monkeypatch.setattr(TrainState, "scalars", lambda _: pytest.fail("its own state was described"))
    copy_state(other, Relay(sent, 1), source=0, receive=False, progress=lambda: None)
    assert not sent
    assert everything(other) == before


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


def test_a_step_is_seeded_as_torch_seeds_without_a_look_at_the_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state = make("SGD")
    seeded: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", seeded.append)
    monkeypatch.setattr("trainchaos.recovery.state.state._accelerated", lambda: True)
    state.seed_step(3, 7)
    monkeypatch.undo()
    torch.manual_seed(seeded[0])
    wanted = torch.rand(4)
    monkeypatch.setattr("traceback.format_stack", lambda: pytest.fail("the stack was looked at"))
    monkeypatch.setattr("trainchaos.recovery.state.state._accelerated", lambda: False)
    state.seed_step(3, 7)
    assert torch.equal(torch.rand(4), wanted)


def test_the_kernel_is_asked_of_nobody_who_moves() -> None:
    detector, asked = trained(), list[str]()

    def kernel(name: str) -> str:
        asked.append(name)
        return "S"

    for look in range(50):
        marks = {f"w{n}": mark("forward" if n % 2 else "collective", moves=look) for n in range(4)}
        assert detector.look(1000.0 + look * TICK_S, marks, kernel) is None
    assert asked == []
    assert detector.look(1001.0, marks | {"w0": mark("collective", moves=50)}, kernel) is None
    assert sorted(asked) == ["w1", "w2", "w3"], "each once"


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


def test_small_tensors_are_looked_at_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[Any] = []
    submit = ThreadPoolExecutor.submit

    def counted(self: ThreadPoolExecutor, work: Any, *args: Any) -> Any:
        submitted.append(work)
        return submit(self, work, *args)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", counted)
    state = train(make("AdamW"), 1)
    saves.save(state, tmp_path, generation=1)
    assert submitted.count(first_not_finite) == 1
    with torch.no_grad():
        next(state.model.parameters())[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match=r"not finite \(model\.0\.weight\)"):
        saves.save(state, tmp_path, generation=1)


def test_a_type_has_one_name() -> None:
    assert [typed.name_of(t) for t in (torch.float32, torch.bfloat16)] == ["float32", "bfloat16"]
