"""torch's reconfigured group as a stack: how it is started, whom its launcher takes into a group,
and what a rank that is behind gets.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.running import until
from tests.support.stack_jobs import output, reported, start
from trainchaos.harness.compare.environments.stack import CommonJob
from trainchaos.harness.compare.stacks.torch_reconfigure import RESTARTS, TorchReconfigure
from trainchaos.harness.peers import torch_reconfigure
from trainchaos.harness.peers.torch_reconfigure import GroupBroken, Launcher, Rank, state_tensors

PYTHON = Path("/env/bin/python")
TRAIN_LIMIT_S = 240.0
JOB = CommonJob(
    size="nano", ranks=4, steps=60, global_batch=16, every=20, seed=7, data=Path("/data/corpus.bin")
)


def test_it_is_started_with_the_timeouts_of_torchs_own_test_unless_tuned() -> None:
    default, tuned = (
        TorchReconfigure(settings).drive(JOB, PYTHON) for settings in ("default", "tuned")
    )
    assert default.env == tuned.env == JOB.environment()
    assert default.argv == (
        str(PYTHON),
        "-m",
        "trainchaos.harness.peers.torch_reconfigure",
        *("--ranks", "4", "--restarts", str(RESTARTS), "--join-limit", "1", "--"),
        *("--group-timeout", "30", "--reconfigure-timeout", "30"),
    )
    said = TorchReconfigure("tuned")
    assert all(f"{value:g}" in tuned.argv for value in said.values.values())
    assert said.fidelity() and said.tuned_because and said.way == "replica"


def test_it_needs_the_torch_that_has_it() -> None:
    needs = TorchReconfigure.requirements
    assert needs is not None and needs.pins == ("torch==2.15.0",)


def test_an_older_torch_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in (JOB.environment() | {"CHAOS_SCRATCH": str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delattr(dist, "_reconfigure", raising=False)
    monkeypatch.setattr(sys, "argv", ["torch_reconfigure", "--ranks", "2"])
    with pytest.raises(SystemExit, match=r"came with 2\.14"):
        torch_reconfigure.main()


class FakeStore:
    """A store in memory; nothing in it ever comes later."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        """As TCPStore."""
        self.values[key] = value

    def get(self, key: str) -> bytes:
        """As TCPStore."""
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        """As TCPStore."""
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], limit: timedelta) -> None:
        """As TCPStore, at the end of its limit."""
        if not self.check(keys):
            raise dist.DistStoreError(str(keys))


class Ranks:
    """A launcher that has started processes 10, 11... for ranks 3, 2, 1, 0, all of them fakes;
    ``killed``: those that it killed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = FakeStore()
        self.launcher = Launcher(["true"], [{}] * 4, self.store, restarts=1, join_limit=0.0)
        self.launcher._living = {10: 3, 11: 2, 12: 1, 13: 0}
        self.killed: list[int] = []
        monkeypatch.setattr(torch_reconfigure, "stat", lambda pid: ("S", 1, 77))
        monkeypatch.setattr(torch_reconfigure, "kill", lambda pid, started: self.killed.append(pid))

    def answer(self, pid: int, step: int) -> None:
        """As a rank answers that wants to be in the next group."""
        number = self.store.values[torch_reconfigure.NEXT]
        words = {"handle": f"h{pid}", "step": step, "loss": step / 10, "scheduler": {"at": step}}
        self.store.set(f"{number}/{pid}", json.dumps(words))
        self.store.set(f"{number}/wanted", "")

    def form(self, **steps: int) -> dict[str, Any]:
        """The plan for these answers, each of process ``p<pid>``; members ask for a group."""
        number = self.store.values[torch_reconfigure.NEXT]
        for name, step in steps.items():
            self.answer(int(name[1:]), step)
        self.store.set(f"{number}/asked", "")
        self.launcher._look(0)
        plan: dict[str, Any] = json.loads(self.store.values[f"{number}/plan"])
        return plan

    def die(self, pid: int) -> None:
        """As reaped."""
        self.launcher._ended[pid] = 137

    def start_again(self, dead: int, pid: int) -> None:
        """A new process for its rank."""
        self.launcher._ended.pop(dead)
        self.launcher._living[pid] = self.launcher._living.pop(dead)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_the_first_group_has_all_ranks_in_their_order(ranks: Ranks) -> None:
    ranks.launcher._look(0)  # nobody has answered: nothing is formed
    assert ranks.store.values == {torch_reconfigure.NEXT: "1"}
    plan = ranks.form(p10=0, p11=0, p12=0, p13=0)
    assert plan["ranks"] == [0, 1, 2, 3] and plan["handles"] == ["h13", "h12", "h11", "h10"]
    assert not plan["send"] and ranks.store.values[torch_reconfigure.NEXT] == "2"


def test_who_died_is_left_out_and_who_is_ahead_sends(ranks: Ranks) -> None:
    ranks.form(p10=0, p11=0, p12=0, p13=0)
    ranks.answer(12, 7)  # and dies then
    ranks.die(12)
    plan = ranks.form(p10=7, p11=8, p13=7)
    assert plan["ranks"] == [0, 2, 3] and plan["source"] == 1 and plan["send"]
    assert (plan["step"], plan["loss"], plan["scheduler"]) == (8, 0.8, {"at": 8})
    assert ranks.killed == []


def test_survivors_of_one_step_send_nothing(ranks: Ranks) -> None:
    ranks.form(p10=0, p11=0, p12=0, p13=0)
    ranks.die(13)
    assert not ranks.form(p10=7, p11=7, p12=7)["send"]


def test_a_member_that_does_not_answer_is_killed(ranks: Ranks) -> None:
    ranks.form(p10=0, p11=0, p12=0, p13=0)
    plan = ranks.form(p10=4, p12=4, p13=4)
    assert ranks.killed == [11] and plan["ranks"] == [0, 1, 3]


def test_a_rank_that_was_started_again_joins_with_the_next_group(ranks: Ranks) -> None:
    ranks.form(p10=0, p11=0, p12=0, p13=0)
    ranks.die(11)
    ranks.form(p10=4, p12=4, p13=4)
    ranks.start_again(11, 20)
    ranks.answer(20, 0)
    ranks.launcher._look(0)  # members are in a step: they have not asked
    assert ranks.store.values[torch_reconfigure.NEXT] == "3"
    plan = ranks.form(p10=5, p12=5, p13=5)
    assert plan["ranks"] == [0, 1, 2, 3] and plan["handles"][2] == "h20"
    assert plan["send"] and plan["source"] != 2 and ranks.killed == []


def test_a_newcomer_that_has_not_answered_is_not_waited_for(ranks: Ranks) -> None:
    ranks.form(p10=0, p11=0, p12=0, p13=0)
    ranks.die(11)
    ranks.form(p10=4, p12=4, p13=4)
    ranks.start_again(11, 20)
    assert ranks.form(p10=5, p12=5, p13=5)["ranks"] == [0, 1, 3] and ranks.killed == []


def test_when_all_have_died_those_started_again_are_a_first_group(ranks: Ranks) -> None:
    ranks.form(p10=0, p11=0, p12=0, p13=0)
    for dead in (10, 11, 12, 13):
        ranks.die(dead)
        ranks.start_again(dead, dead + 10)
    for pid in (20, 21, 22, 23):
        ranks.answer(pid, 20)
    ranks.launcher._look(0)  # nobody is left to ask
    plan = json.loads(ranks.store.values["2/plan"])
    assert plan["ranks"] == [0, 1, 2, 3] and plan["step"] == 20


def trained(steps: int) -> tuple[nn.Module, torch.optim.AdamW]:
    """A small model after so many steps."""
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


class FakeRank(Rank):
    """A rank without a group: step 0, having tried step 3 with 5 samples."""

    def __init__(self) -> None:
        model, optimizer = trained(0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        self.reports: list[tuple[int, float, int]] = []
        self.training: Any = SimpleNamespace(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            report=lambda *words: self.reports.append(words),
        )
        self.device = torch.device("cpu")
        self.step, self.tried, self.loss = 0, (3, 5), 0.0


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_rank_that_is_behind_gets_all_state_and_reports_the_step_it_took_part_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = trained(3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    for _ in range(3):
        scheduler.step()
    sent = [one.clone() for one in state_tensors(model, optimizer)]

    def broadcast(flat: Tensor, *, group_src: int) -> None:
        assert group_src == 2
        flat.copy_(torch.cat([one.reshape(-1).float() for one in sent]))

    monkeypatch.setattr(dist, "broadcast", broadcast)
    rank = FakeRank()
    words = json.loads(json.dumps(scheduler.state_dict()))
    rank._receive({"source": 2, "step": 3, "loss": 0.25, "scheduler": words})
    got = list(state_tensors(rank.training.model, rank.training.optimizer))
    assert len(got) == len(sent) and all(map(torch.equal, got, sent))
    assert rank.training.optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert rank.step == 3 and rank.reports == [(3, 0.25, 5)]


def test_only_what_torch_raises_in_a_call_of_the_group_breaks_it() -> None:
    with pytest.raises(GroupBroken), torch_reconfigure.whole():
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(KeyError), torch_reconfigure.whole():
        raise KeyError("a defect")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.bin"
    path.write_bytes(bytes(i * i % 251 for i in range(300 * 64 + 1)))
    return path


@pytest.mark.real
@pytest.mark.long
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_go_on_and_the_lost_rank_comes_back(
    sent: signal.Signals, data: Path, tmp_path: Path
) -> None:
    """Nothing is done again, every sample is reported, and the last step is that of all ranks."""
    scratch, steps = tmp_path / "job", 400
    job = start("torch-reconfigure", "tuned", data, scratch, ranks=3, steps=steps)
    try:

        def begun() -> list[int]:
            assert job.poll() is None, output(scratch)
            said = [one for one in reported(scratch) if one.rank == 1 and one.step >= 5]
            return [one.pid for one in said if one.pid is not None]

        until(lambda: bool(begun()), TRAIN_LIMIT_S)
        os.kill(begun()[0], sent)
        assert job.wait(TRAIN_LIMIT_S) == 0, output(scratch)
    finally:
        job.kill()
        job.wait()
    said = reported(scratch)
    samples = {step: 0 for step in range(1, steps + 1)}
    for one in said:
        samples[one.step] += one.samples or 0
    whole = [step for step, count in samples.items() if count == 8]
    # of the step in which it was lost, its share may have been trained on without its report
    assert len(whole) >= steps - 1, output(scratch)
    assert {one.rank for one in said if one.step == steps} == {0, 1, 2}
    assert len({one.pid for one in said if one.rank == 1}) == 2
