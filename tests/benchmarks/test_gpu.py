"""The GPU benchmark: its page, its skip, a rehearsal on the CPU, and its parts on a real GPU where
there is one.
"""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import jobs, parts
from benchmarks.gpu.__main__ import BEGIN, END, placed
from trainchaos.chaos.errors import EXIT_SKIPPED

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
CUDA, CPU = (Namespace(device=name, size="tiny") for name in ("cuda", "cpu"))
NEEDS_GPU = pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU")


def test_without_a_gpu_it_is_skipped_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "gpus", lambda: 0)
    page = tmp_path / "page.md"
    assert program.main(["--out", str(page)]) == EXIT_SKIPPED
    assert "no CUDA device" in capsys.readouterr().err and not page.exists()


def test_the_page_says_what_was_measured_what_was_not_and_on_what() -> None:
    job = jobs.GpuMeasured(
        steps=[0.5, 0.25], detected=[0.01], recovered=[1.5], note="step 9 did not come in time"
    )
    measured: dict[str, tuple[dict[str, Any], str]] = {
        "nccl": ({"form_s": [0.125, 0.25, 0.5]}, ""),
        "state": ({"bytes": 1_500_000_000}, ""),
        "faults": ({"landed": {"gradient nan": True, "rng zero": False}}, ""),
        "other": ({}, "not run: no time left"),
    }
    about = {"torch": "2.11", "device": "H100"}
    skipped = {"shards": "this torch cannot"}
    page = program.page(CUDA, about, measured, {"hot-spare": job}, skipped)
    assert "- Not run: shards: this torch cannot\n" in page
    assert "torch 2.11, device H100" in page and "rehearsal" not in page
    assert (
        "| hot-spare | 2 | 0.375 | 0.250 to 0.500 | 1 | 0.010 | 0.010 to 0.010 | 1 | 1.500 | 1.500"
        " to 1.500 |" in page
    )
    assert "- hot-spare: step 9 did not come in time" in page
    assert "| form a group of one | 3 | 0.25000 | 0.12500 to 0.50000 |" in page
    assert "1 of 2 landed on cuda tensors" in page and "not rng zero" in page
    assert "other: not run: no time left" in page
    assert "None of these figures is of a GPU" in program.page(CPU, {}, measured, {}, {})


def test_a_page_keeps_what_was_written_by_hand() -> None:
    measured = program.page(CUDA, {}, {"faults": ({}, ""), "state": ({}, "")}, {}, {})
    there = f"# Title\n\nBy hand.\n\n{BEGIN}old\n{END}\nAfter.\n"
    twice = placed(measured, placed(measured, there))
    assert twice.startswith("# Title\n\nBy hand.\n") and twice.endswith("\nAfter.\n")
    assert "old" not in twice and twice.count("# Results on GPUs") == 0
    assert twice.count("## Recovery") == 1 and placed(measured, "") == measured


def test_what_this_torch_and_this_machine_cannot_do_is_named_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = parts.machine(torch.device("cpu"), "tiny")
    played: list[jobs.GpuRow] = []

    def play(row: jobs.GpuRow, *_: object) -> jobs.GpuMeasured:
        played.append(row)
        return jobs.GpuMeasured()

    monkeypatch.setattr(program, "gpus", lambda: 1)
    monkeypatch.setattr(program, "play", play)
    monkeypatch.setattr(
        program, "part", lambda name, *_: (dict(about) if name == "machine" else {}, "")
    )
    page = tmp_path / "page.md"
    assert program.main(["--out", str(page)]) == 0
    assert {row.gpus for row in played} == {1}
    text = page.read_text()
    for row in jobs.ROWS:
        assert (f"- Not run: {row.name}: " in text) == (row not in played) and row.name in text
    assert text.count("it needs 2 GPUs, there is 1") == 2


@pytest.mark.slow
def test_every_fault_that_changes_a_tensor_lands_here_too() -> None:
    landed = parts.faults(torch.device("cpu"), "tiny")["landed"]
    assert len(landed) > 35 and [name for name, yes in landed.items() if not yes] == []


@pytest.mark.real
@pytest.mark.long
def test_a_rehearsal_on_the_cpu_fills_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert (
        program.main(["--device", "cpu", "--size", "tiny", "--minutes", "4", "--out", str(page)])
        == 0
    )
    assert page.read_text().count("SIGKILL") == 3


# ---- with a GPU


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.real
def test_every_fault_that_changes_a_tensor_lands_on_cuda_tensors() -> None:
    landed = parts.faults(torch.device("cuda:0"), "tiny")["landed"]
    assert [name for name, yes in landed.items() if not yes] == []


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.real
def test_groups_of_nccl_are_formed_aborted_and_formed_anew() -> None:
    found = parts.nccl(torch.device("cuda:0"), "tiny")
    assert len(found["abort_s"]) == parts.ROUNDS["cuda"] and max(found["abort_s"]) < 60


@NEEDS_GPU
@pytest.mark.gpu
@pytest.mark.real
@pytest.mark.parametrize("row", jobs.ROWS, ids=[row.name for row in jobs.ROWS])
def test_a_killed_rank_is_recovered_from(row: jobs.GpuRow) -> None:
    if why := row.why_not(GPUS, "cuda"):
        pytest.skip(why)
    found = jobs.play(row, "cuda", "tiny", 8, time.monotonic() + 120)
    assert (found.note, len(found.recovered)) == ("", jobs.INCIDENTS)
