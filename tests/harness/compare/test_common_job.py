"""The job that every compared stack trains: the same samples, losses and checkpoints whoever trains
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainchaos import beacon
from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.compare.environments.stack import CommonJob
from trainchaos.harness.peers import common, ours
from trainchaos.harness.peers.common import Training
from trainchaos.recovery.collectives.group import GenerationLost
from trainchaos.recovery.data import order

BLOCK, SAMPLES, STEPS, BATCH, SEED = 64, 300, 6, 8, 3
LIMIT_S = 250.0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.bin"
    path.write_bytes(bytes(i * i % 251 for i in range(SAMPLES * BLOCK + 1)))
    return path


def the_job(data: Path, *, ranks: int = 1) -> CommonJob:
    return CommonJob(
        size="nano", ranks=ranks, steps=STEPS, global_batch=BATCH, every=2, seed=SEED, data=data
    )


@pytest.fixture
def training(data: Path, tmp_path: Path) -> Training:
    return Training(the_job(data), tmp_path)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one rank."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


class FakeJob:
    """A job of ours of three steps, of which the group of one breaks after the reduction, which the
    next group then commits.
    """

    rank = 0

    def __init__(self, breaks: int) -> None:
        self.breaks = breaks
        self.state = SimpleNamespace(step=0, last=(0, 0.0))
        self.checkpoints = SimpleNamespace(disk=None)
        self.broken = False

    def attach(self, *_: object, **__: object) -> None:
        """Nothing to do."""

    def running(self) -> bool:
        """As the script asks; the next group commits what the last one did not."""
        if self.broken:
            self.broken = False
            self.commit(self.breaks)
        return self.state.step < 3

    def commit(self, step: int) -> None:
        """Done."""
        self.state.step, self.state.last = step, (step, step / 10)

    @contextmanager
    def step(self) -> Iterator[Any]:
        """The next one."""
        number = self.state.step + 1
        with_failure = number == self.breaks

        def commit() -> None:
            if with_failure:
                raise GenerationLost("a rank is gone")
            self.commit(number)

        try:
            yield SimpleNamespace(
                number=number, samples=[1, 2], count=2, backward=lambda _: None, commit=commit
            )
        except GenerationLost:
            self.broken = True


@pytest.mark.parametrize("breaks", [2, 3])
def test_a_step_that_is_committed_as_its_generation_breaks_is_reported_once(
    training: Training, monkeypatch: pytest.MonkeyPatch, breaks: int
) -> None:
    """Else its samples count as lost; no further step would report the last one."""
    told: list[tuple[int, float, int]] = []
    monkeypatch.setattr(Training, "from_environment", classmethod(lambda _: training))
    monkeypatch.setattr(Training, "report", lambda _, *said: told.append(said))
    monkeypatch.setattr(ours, "point", lambda *_: None)
    monkeypatch.setattr(ours.recovery, "join", lambda **_: FakeJob(breaks))
    monkeypatch.setenv("RANK", "0")
    ours.main()
    assert told == [(1, 0.1, 2), (2, 0.2, 2), (3, 0.3, 2)]


def test_the_environment_holds_all_of_the_job(data: Path) -> None:
    job = the_job(data, ranks=4)
    env = job.environment()
    assert CommonJob.from_environment(env) == job
    assert CommonJob.from_environment(env | {"CHAOS_SEED": "9"}).seed == 9
    with pytest.raises(ScenarioError, match="JOB_STEPS, JOB_DATA"):
        CommonJob.from_environment(env | {"JOB_STEPS": "many", "JOB_DATA": ""})
    with pytest.raises(ScenarioError, match="CHAOS_SCRATCH"):
        Training.from_environment(env)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_ranks_share_the_global_batch_of_the_order(training: Training, world: int) -> None:
    for step in (1, 2, 50):
        shares = [training.ids(step, rank, world) for rank in range(world)]
        assert [sample for share in shares for sample in share] == order.batch(
            step, BATCH, SAMPLES, SEED
        )


@pytest.mark.slow
def test_a_checkpoint_goes_on_bit_for_bit_and_is_whole_or_not_there(
    data: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    def look(name: str, step: int) -> None:
        if name == "saving":
            partial = tmp_path / "one" / "checkpoints" / f"step-{step:08}.tmp"
            seen.append((step, partial.stat().st_size))

    monkeypatch.setattr(beacon, "point", look)
    one = Training(the_job(data), tmp_path / "one")
    assert one.load() == 0
    common.train(one, DistributedDataParallel(one.model), 0)
    assert [path.name for path in one.saved()] == ["step-00000004.pt", "step-00000006.pt"]
    whole = one.saved()[-1].stat().st_size
    assert [step for step, _ in seen] == [2, 4, 6] and seen[-1][1] == whole // 2
    one.saved()[-1].unlink()
    other = Training(the_job(data), tmp_path / "one")
    assert other.load() == 4
    common.train(other, DistributedDataParallel(other.model), 4)
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    os.truncate(other.saved()[-1], whole // 2)
    # torch's own error: nobody falls back
    with pytest.raises(RuntimeError, match="central directory"):
        other.load()


def test_points_come_in_order_and_nan_is_in_every_gradient(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    done: list[tuple[str, int]] = []

    def answer(name: str, step: int) -> str | None:
        names.append(name)
        return "nan" if name == "gradient" and step == 2 else None

    def did(what: str, step: int, *, before: float, after: float) -> None:
        assert before == before and after != after
        done.append((what, step))

    monkeypatch.setattr(beacon, "point", answer)
    monkeypatch.setattr(beacon, "did", did)
    for step in (1, 2):
        training.backward(training.loss(training.model, step, 0, training.ids(step, 0, 1)))
        bad = [
            torch.isnan(p.grad).all().item()
            for p in training.model.parameters()
            if p.grad is not None
        ]
        assert all(bad) if step == 2 else not any(bad)
        training.apply()
    assert names == ["data", "forward", "gradient", "backward", "optimizer"] * 2
    assert done == [("nan", 2)]
    training.backward(training.loss(training.model, 3, 0, training.ids(3, 0, 1)))
    assert done == [("nan", 2)], "the hooks are gone"
