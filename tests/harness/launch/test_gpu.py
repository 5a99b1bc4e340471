"""Devices: who is on which, one that is refused, and the gpu faults, simulated and with real
processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.run.test_real import run
from tests.support.arms import judged
from tests.support.decided import unpassed
from tests.support.search.simulate import cell_of, evidence, play
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.scenario.model import Cell
from trainchaos.chaos.scenario.workload import WorkloadSpec
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch import devices
from trainchaos.harness.launch.devices import DeviceBoard, on_node, slots, torch_name
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launch.rank_setup import rank_config
from trainchaos.harness.launch.workload import DataInfo
from trainchaos.recovery import run as run_module
from trainchaos.recovery.cli.options import UsageError
from trainchaos.recovery.policy.jobconfig import Exchange, JobConfig

TWO = ("cuda:0", "cuda:1")

LOST = {"id": "lost", "kind": "gpu-lost", "target": {"rank": 2}, "at": {"step": 20}}


def test_a_replacement_gets_the_lost_process_s_device_unless_that_is_refused() -> None:
    board = DeviceBoard(lambda node: slots(3))
    living = ["w0", "w1", "w2"]
    assert [board.assign(name, living[:index]) for index, name in enumerate(living)] == slots(3)
    assert board.assign("w3", ["w0", "w2"]) == "cpu:1"
    assert board.refuse("w3") == "cpu:1"
    assert board.assign("w4", ["w0", "w2"]) == "cpu:0"
    board.accept("w3")
    board.accept("w3")
    assert board.assign("w5", ["w0", "w2", "w4"]) == "cpu:1"


def test_the_last_device_cannot_be_lost() -> None:
    board = DeviceBoard(lambda node: ["cuda:0"])
    board.assign("w0", [])
    with pytest.raises(RuntimeError, match="last device"):
        board.refuse("w0")
    assert [torch_name(place) for place in ("cpu:3", "cuda:1")] == ["cpu", "cuda:1"]
    assert [torch_name(on_node(place, 2)) for place in ("cpu:3", "cuda:1")] == ["cpu", "cuda:1"]


def test_each_node_has_devices_of_its_own() -> None:
    board = DeviceBoard(lambda node: [on_node("cuda:0", node)], range(2))
    assert board.assign("w0", [], 0) == "cuda:0@n0"
    assert board.assign("w1", ["w0"], 1) == "cuda:0@n1"
    assert board.refuse("w0") == "cuda:0@n0"
    assert [board.takes(node) for node in range(2)] == [False, True]
    with pytest.raises(RuntimeError, match="last device"):
        board.refuse("w1")
    board.accept("w0")
    assert board.takes(0)


def test_gpus_that_only_dev_knows_of_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(run_module, "_GPUS", tmp_path / "none")
    monkeypatch.setattr(run_module, "_DEVICES", tmp_path)
    assert run_module._places("auto", "auto", 2) == (("cpu",), Exchange("gloo"))
    for asked in (("cuda", "auto"), ("auto", "nccl")):
        with pytest.raises(UsageError, match="shows no NVIDIA GPU"):
            run_module._places(*asked, 2)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).symlink_to("/dev/null")
    assert run_module._places("auto", "auto", 2) == (TWO, Exchange("nccl"))
    assert run_module._places("cuda", "auto", 3) == (TWO, Exchange("gloo"))
    assert run_module._places("cuda", "gloo", 2) == (TWO, Exchange("gloo"))
    assert run_module._places("cuda", "nccl", 3) == (TWO, Exchange("nccl", shared_gpus=True))


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"),
    [
        (0, "auto", Exchange("gloo")),
        (5, "auto", Exchange("nccl")),
        (4, "auto", Exchange("gloo")),  # no GPU of its own for the spare
        (5, "gloo", Exchange("gloo")),
        (1, "nccl", Exchange("nccl", shared_gpus=True)),
    ],
)
def test_a_built_in_workload_s_ranks_are_on_the_device_over_the_exchange_of_their_place(
    gpus: int, asked: Any, expected: Exchange, tmp_path: Path
) -> None:
    cell = cell_of("hot-spare", [LOST])
    workload = cell.scenario.workload.model_copy(update={"device": "auto", "backend": asked})
    places, exchange = devices.placement(workload, gpus, 1)
    assert exchange == expected
    setup = ArmSetup(
        id="r0",
        cell=cell,
        repeat=0,
        arm="faulted",
        seed=1,
        run=RunDirectory(tmp_path),
        data=DataInfo(path=tmp_path, samples=64, digest="", about=""),
    )
    config = rank_config(
        setup,
        name="w0",
        role="worker",
        events=tmp_path,
        logs=tmp_path,
        device=places[0],
        exchange=exchange,
    )
    job = JobConfig.model_validate(config.job)
    assert (job.backend, job.shared_gpus) == exchange
    assert job.device == config.device == ("cuda:0" if gpus else "cpu")


def test_nccl_where_nothing_is_on_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"kind": "mlp", "ranks": 2, "steps": 4, "global_batch": 4}
    with pytest.raises(ValueError, match="backend: nccl exchanges what is on GPUs"):
        WorkloadSpec(**given, device="cpu", backend="nccl")
    scenario = cell_of("hot-spare", [LOST]).scenario
    workload = WorkloadSpec(**given, backend="nccl")
    cell = Cell(id="one", params={}, scenario=scenario.model_copy(update={"workload": workload}))
    monkeypatch.setattr(devices, "cuda_devices", list)
    assert devices.missing(cell) == "needs 1 CUDA devices, this machine has 0"


def spawned(log: Any) -> dict[str, Event]:
    """Process -> how it was started."""
    return {event.data["process"]: event for event in log.of(Kind.PROCESS_SPAWNED)}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("recovery", ["checkpoint-restart", "drop-replica", "hot-spare"])
def test_nobody_starts_on_a_lost_device_until_it_is_replaced(recovery: str, memory: Path) -> None:
    again = {"id": "again", "kind": "process-kill", "target": {"rank": 1}, "at": {"step": 45}}
    cell = cell_of(recovery, [{**LOST, "duration": 0.7}, again])
    faulted, control = (play(cell, memory, seed=3, arm=arm) for arm in ("faulted", "control"))  # type: ignore[arg-type]
    found = evidence(faulted, control)
    assert {n: f.witness for n, f in judged(found).items() if f.verdict != "pass"} == {}
    started = spawned(faulted.log)
    (lost,) = [e for e in faulted.log.of(Kind.FAULT_INJECTED) if e.data["fault"] == "lost"]
    (healed,) = [e for e in faulted.log.of(Kind.FAULT_HEALED) if e.data["fault"] == "lost"]
    device = started[lost.data["target"]["process"]].data["device"]
    meanwhile = [e for e in started.values() if lost.time_ns < e.time_ns < healed.time_ns]
    assert meanwhile and device not in {e.data["device"] for e in meanwhile}
    if recovery == "checkpoint-restart":
        assert device in {e.data["device"] for e in started.values() if e.time_ns > healed.time_ns}


@pytest.mark.long
@pytest.mark.real
def test_each_gpu_fault_is_survived_for_real(tmp_path: Path) -> None:
    faults = ", ".join(
        f"{{id: {kind}, kind: {kind}, params: {params}, target: {{rank: {rank}}}, at: {{step:"
        f" {step}}}, expect: {{outcome: recovered, detected_by: {cause}}}}}"
        for kind, params, rank, step, cause in (
            ("gpu-error", "{}", 1, 12, "exit"),
            ("gpu-oom", "{}", 2, 27, "exit"),
            ("gpu-hang", "{hold_s: 60}", 0, 42, "hang"),
            ("gpu-lost", "{}", 3, 57, "exit"),
        )
    )
    # Steps that take tens of milliseconds, so that the job is whole again before the next fault is
    # due.
    gpt = "{kind: gpt, size: nano, ranks: 4, steps: 80, global_batch: 16, checkpoint: {every: 10}}"
    code, results = run(tmp_path, workload=gpt, recovery="hot-spare", faults=f"[{faults}]")
    assert (unpassed(results), code) == ({}, 0), results.reason
    assert results.cells[0].exactness in ("bit for bit", "within the control band")
    errors = [i.evidence.get("error") for i in results.faults if i.kind in ("gpu-error", "gpu-oom")]
    assert errors == ["DeviceError", "OutOfMemoryError"]


@pytest.mark.gpu
@pytest.mark.real
@pytest.mark.parametrize(
    ("fault", "recovery"),
    [
        ("process-kill", "hot-spare"),
        ("process-kill", "drop-replica"),
        ("process-kill", "checkpoint-restart"),
        ("process-stop", "hot-spare"),
        ("collective-skip", "drop-replica"),
    ],
)
def test_ranks_that_share_a_gpu_over_nccl_recover(
    fault: str, recovery: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
        pytest.skip("there is no CUDA device here, or no NCCL")
    nano = "kind: gpt, size: nano, ranks: 2, steps: 40, global_batch: 8, checkpoint: {every: 10}"
    code, results = run(
        tmp_path,
        workload=f"{{{nano}, device: cuda, backend: nccl}}",
        recovery=recovery,
        faults=f"[{{id: f, kind: {fault}, target: {{rank: 1}}, at: {{step: 14}}}}]",
    )
    assert (unpassed(results), code) == ({}, 0), results.reason


@pytest.mark.gpu
@pytest.mark.real
def test_a_real_cuda_device_runs_out_of_memory_and_hangs() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    from types import SimpleNamespace

    from trainchaos.harness.rank.shims.body import BodyShim

    body = BodyShim(SimpleNamespace(device="cuda:0"))  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError, match="CUDA"):
        body.exhaust_device()
    body.block(0.2)
    assert torch.zeros(1, device="cuda:0").item() == 0
