"""The job that every compared stack trains: the same samples, losses and checkpoints whoever trains
it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from trainchaos import beacon
from trainchaos.chaos.errors import ScenarioError
from trainchaos.harness.compare.environments import environments
from trainchaos.harness.compare.environments.stack import FAMILIES, CommonJob, Settings
from trainchaos.harness.compare.environments.tuned import stack_of
from trainchaos.harness.peers import common, ours
from trainchaos.harness.peers.common import Training
from trainchaos.harness.script.listen.progress import parse_beacon
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


def reported(path: Path) -> dict[int, set[float | None]]:
    """Step -> losses that ranks reported."""
    found: dict[int, set[float | None]] = {}
    for line in path.read_text().splitlines():
        progress = parse_beacon(line)
        assert progress is not None
        found.setdefault(progress.step, set()).add(progress.loss)
    return found


class BrokenJob:
    """A job of ours whose generation breaks in its last step, which is committed as the next one
    forms.
    """

    rank = 0

    def __init__(self, last: int) -> None:
        self.last, self.begun = last, 0
        self.state = SimpleNamespace(step=0, last=(0, 0.0))
        self.checkpoints = SimpleNamespace(disk=None)

    def attach(self, *_: object, **__: object) -> None: ...

    def running(self) -> bool:
        return self.begun < self.last

    @contextmanager
    def step(self) -> Iterator[SimpleNamespace]:
        self.begun += 1
        number = self.begun

        def commit() -> None:
            if number == self.last:
                raise GenerationLost("a rank is gone")
            self.done(number)

        step = SimpleNamespace(number=number, samples=[1], count=1, backward=lambda _: None)
        step.commit = commit
        with suppress(GenerationLost):
            yield step
        self.done(number)

    def done(self, number: int) -> None:
        self.state.step, self.state.last = number, (number, 1.0 / number)


def test_a_last_step_that_is_committed_as_its_generation_breaks_is_reported(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its samples count as lost, and no further step would report it."""
    told: list[tuple[int, float, int]] = []
    monkeypatch.setattr(Training, "from_environment", classmethod(lambda _: training))
    monkeypatch.setattr(Training, "report", lambda _, *said: told.append(said))
    monkeypatch.setattr(ours, "point", lambda *_: None)
    monkeypatch.setattr(ours.recovery, "join", lambda **_: BrokenJob(last=3))
    monkeypatch.setenv("RANK", "0")
    ours.main()
    assert told == [(1, 1.0, 1), (2, 1 / 2, 1), (3, 1 / 3, 1)]


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


@pytest.mark.parametrize("settings", ["default", "tuned"])
@pytest.mark.parametrize(
    "name", ["none", "torchrun", "hot-spare", "drop-replica", "checkpoint-restart"]
)
def test_what_starts_it(name: str, settings: Settings, data: Path) -> None:
    stack, job = stack_of(name, environments.find(name), settings), the_job(data, ranks=4)
    drive = stack.drive(job, Path("/env/bin/python"))
    assert drive.argv[0] == "/env/bin/python" and "4" in drive.argv
    assert job.environment().items() <= drive.env.items()
    said = " ".join(drive.argv) + str(drive.env)
    assert all(str(value) in said for value in stack.chosen().values()), (
        "what it says it does, it does"
    )
    assert all(stack.not_offered(family) is None for family in FAMILIES)
    assert stack.provisioned(job) == (5 if name == "hot-spare" else 4)


def train_under(
    name: str, settings: Settings, data: Path, scratch: Path
) -> dict[int, set[float | None]]:
    """Start a stack as a comparison does, without faults; what its ranks reported."""
    scratch.mkdir()
    stack = stack_of(name, environments.find(name), settings)
    drive = stack.drive(the_job(data, ranks=2), Path(sys.executable))
    reports = scratch / "beacon"
    reports.touch()
    env = {**os.environ, **drive.env, "CHAOS_SCRATCH": str(scratch), beacon.VARIABLE: str(reports)}
    argv = [word.replace("$CHAOS_SCRATCH", str(scratch)) for word in drive.argv]
    ran = subprocess.run(
        argv, env=env, cwd=scratch, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert any((scratch / "checkpoints").iterdir())
    return reported(reports)


@pytest.mark.long
@pytest.mark.real
@pytest.mark.slow
def test_a_stack_that_nothing_happens_to_reports_every_step(data: Path, tmp_path: Path) -> None:
    losses = train_under("none", "default", data, tmp_path / "none")
    assert sorted(losses) == list(range(1, STEPS + 1))
    assert all(len(said) == 1 for said in losses.values()), (
        "all ranks report the loss of the global batch"
    )


@pytest.mark.real
@pytest.mark.long
def test_losses_are_the_same_step_by_step_under_every_stack_of_ours(
    data: Path, tmp_path: Path
) -> None:
    plain = train_under("none", "default", data, tmp_path / "none")
    assert train_under("torchrun", "default", data, tmp_path / "a") == plain
    assert train_under("torchrun", "tuned", data, tmp_path / "b") == plain
    mine: list[tuple[str, Settings]] = [
        ("hot-spare", "default"),
        ("drop-replica", "tuned"),
        ("checkpoint-restart", "tuned"),
    ]
    for name, settings in mine:
        ours = train_under(name, settings, data, tmp_path / f"{name}-{settings}")
        for step, said in plain.items():
            assert sorted(filter(None, ours[step])) == pytest.approx(
                sorted(filter(None, said)), rel=1e-5
            )
