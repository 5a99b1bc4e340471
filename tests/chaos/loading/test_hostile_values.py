"""Any value may stand in an event log: judging it takes bounded time, raises nothing, and proves
nothing by it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.costs import processor_s
from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.errors import NewerVersion
from trainchaos.chaos.events.log import LOG_VERSION
from trainchaos.chaos.loading.load import load
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.judge.results import Results
from trainchaos.harness.judge.verdict.judge import judge
from trainchaos.harness.run.runner import run_scenario

TEXT = """\
version: 1
name: hostile
launcher: sim
workload: {kind: gpt, size: nano, ranks: 4, steps: 30, global_batch: 16, determinism: default,
  checkpoint: {every: 10}}
recovery: {strategy: hot-spare, spares: 1}
faults:
  - {id: kill, kind: process-kill, target: {rank: 2}, at: {step: 12, phase: backward}}
"""
ODD: tuple[Any, ...] = (
    None,
    "x",
    "",
    -1,
    0,
    10**12,
    10**30,
    1.5,
    1e308,
    True,
    [],
    [None],
    [{}],
    {},
    {"a": [1]},
    [[[[]]]],
    "0" * 5000,
)
VERSION = ("run_started", "log_version")
"""The one place where an odd value is a statement: a newer program wrote this, which is refused."""
PARTS = 6
"""Of all odd values, which take minutes on a busy machine."""
MOST_TIMES = 20
"""What one judgement may take, by that of the healthy run: none is to take for ever."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a simulated run that passed."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile.yaml").write_text(TEXT)
    loaded = load(folder / "hostile.yaml", build_catalogue())
    results = run_scenario(loaded, runs=folder / "runs", seed=None, live=False, argv=["run"])
    assert results.verdict == "pass", results.reason
    root = folder / "runs" / "hostile" / results.run_id
    (root / "seal.json").unlink()  # what is done to it is to be judged
    return root


def as_json(root: Path) -> Results:
    """Judged, and as JSON too."""
    results = judge(RunDirectory(root))
    json.dumps(results.model_dump(mode="json"), allow_nan=False)
    return results


@cache
def usual_s(played: Path) -> float:
    """What it takes to judge the run as it is."""
    return min(processor_s(lambda: as_json(played)) for _ in range(3))


def judged(root: Path, played: Path) -> Results:
    """In bounded time."""
    found: list[Results] = []
    took_s = processor_s(lambda: found.append(as_json(root)))
    assert took_s < MOST_TIMES * usual_s(played)
    return found[0]


def places(root: Path) -> dict[tuple[str, str], tuple[Path, int]]:
    """(kind, key of its data or of the event) -> a file and line that has it."""
    found: dict[tuple[str, str], tuple[Path, int]] = {}
    for file in sorted(root.glob("events/*/*.jsonl")):
        for number, line in enumerate(file.read_text().splitlines()):
            event = json.loads(line)
            for key in (*event["data"], "@step", "@generation", "@time_ns", "@seq"):
                found.setdefault((event["kind"], key), (file, number))
    return found


def with_value(file: Path, number: int, key: str, value: Any) -> str:
    """The whole of a file whose one line has another value."""
    lines = file.read_text().splitlines()
    event = json.loads(lines[number])
    if key.startswith("@"):
        event[key[1:]] = value
    else:
        event["data"][key] = value
    lines[number] = json.dumps(event)
    return "\n".join(lines) + "\n"


def cases(played: Path) -> Iterator[tuple[tuple[str, str], tuple[Path, int], Any]]:
    """Every key of every kind of event with every odd value."""
    for which, place in places(played).items():
        for value in ODD:
            yield which, place, value


def verdict_after(played: Path, folder: Path, chosen: list[Any]) -> str:
    """Judge the run once with each of them, and at last as it was."""
    root = folder / played.name
    shutil.copytree(played, root)
    for which, (file, number), value in chosen:
        there = root / file.relative_to(played)
        whole = there.read_text()
        there.write_text(with_value(there, number, which[1], value))
        try:
            if which == VERSION and type(value) is int and value > LOG_VERSION:
                with pytest.raises(NewerVersion):
                    judged(root, played)
            else:
                judged(root, played)
        except Exception as error:
            raise AssertionError(f"{which} = {value!r:.60}") from error
        finally:
            there.write_text(whole)
    return judged(root, played).verdict


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_no_odd_value_breaks_anything(played: Path, tmp_path: Path, part: int) -> None:
    assert verdict_after(played, tmp_path, list(cases(played))[part::PARTS]) == "pass"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ranks", 10**9),
        ("global_batch", 10**12),
        ("steps", "many"),
        ("order", {"samples": 1e9}),
        ("spares", -1),
    ],
)
def test_a_job_of_absurd_size_is_inconclusive_and_says_so(
    played: Path, tmp_path: Path, key: str, value: Any
) -> None:
    root = tmp_path / played.name
    shutil.copytree(played, root)
    file, number = places(root)["run_started", key]
    file.write_text(with_value(file, number, key, value))
    results = judged(root, played)
    assert results.verdict == "inconclusive"
    assert "makes no sense" in results.reason and key in results.reason


def test_a_step_that_nobody_can_count_to_is_inconclusive(played: Path, tmp_path: Path) -> None:
    root = tmp_path / played.name
    shutil.copytree(played, root)
    file, number = places(root)["step_committed", "@step"]
    file.write_text(with_value(file, number, "@step", 10**15))
    assert judged(root, played).verdict == "inconclusive"
