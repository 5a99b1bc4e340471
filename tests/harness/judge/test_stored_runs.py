"""Runs that were played at commit e64914e are judged as they were then.

``stored/*.tar.xz``: what judging reads of a run, and its ``results.json``, in the form that commit
d5ea7fc9 gives it: four cells with real ranks, four simulated ones, and a command that torchrun
starts.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.portions import long_but
from trainchaos.chaos.cli import invoke

STORED = sorted((Path(__file__).parent / "stored").glob("*.tar.xz"))


def leaves(tree: Any, at: str = "") -> dict[str, Any]:
    """Each value of a JSON tree by its place; numbers to nine digits, as Python 3.12 sums more
    exactly.
    """
    if isinstance(tree, dict):
        return {
            place: leaf for key in tree for place, leaf in leaves(tree[key], f"{at}.{key}").items()
        }
    if isinstance(tree, list):
        rows = (leaves(one, f"{at}[{number}]") for number, one in enumerate(tree))
        return {place: leaf for row in rows for place, leaf in row.items()} | {
            f"{at}.len": len(tree)
        }
    return {at: float(f"{tree:.9g}") if isinstance(tree, float) else tree}


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("archive", STORED, ids=lambda path: path.name.partition(".")[0])
def test_a_run_of_before_is_judged_the_same(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (run,) = tmp_path.iterdir()
    before = json.loads((run / "results.json").read_text())
    (run / "results.json").unlink()
    assert invoke(["analyze", str(run), "-q"]) == before["exit_code"] == 0
    assert leaves(json.loads((run / "results.json").read_text())) == leaves(before)


@pytest.mark.long
def test_a_log_that_is_missing_is_nobodys_failure(tmp_path: Path) -> None:
    """Of each process in turn, in a cell that had passed: what it took or committed is not known,
    so that nothing is shown to be lost, and no metric is measured.
    """
    with tarfile.open(next(path for path in STORED if path.name.startswith("kill-one"))) as packed:
        packed.extractall(tmp_path, filter="data")
    (run,) = tmp_path.iterdir()
    for log in sorted((run / "events").glob("*hot-spare*.faulted/[sw]*.jsonl")):
        kept = log.read_bytes()
        log.unlink()
        code = invoke(["analyze", str(run), "-q"])
        results = json.loads((run / "results.json").read_text())
        failed = [
            (sla["metric"], sla["detail"]) for sla in results["slas"] if sla["verdict"] == "fail"
        ] + [
            (name, finding["witness"])
            for cell in results["cells"]
            for name, finding in cell["invariants"].items()
            if finding["verdict"] == "fail"
        ]
        assert failed == [], log.name
        assert code == 3, log.name
        log.write_bytes(kept)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("how", long_but(["torn", "short", "garbage", "hole"], "torn", "hole"))
def test_a_log_that_is_damaged_is_nobodys_failure(tmp_path: Path, how: str) -> None:
    """Of each process in turn: half of its log is gone, in the midst of a line or after one, or no
    line of it can be read, or some lines are gone from its midst.
    """
    with tarfile.open(next(path for path in STORED if path.name.startswith("kill-one"))) as packed:
        packed.extractall(tmp_path, filter="data")
    (run,) = tmp_path.iterdir()
    for log in sorted((run / "events").glob("*hot-spare*.faulted/[sw]*.jsonl")):
        kept = log.read_bytes()
        lines = kept.splitlines(keepends=True)
        half = len(lines) // 2
        damaged = {
            "torn": kept[: len(kept) // 2],
            "short": b"".join(lines[:half]),
            "garbage": b"garbage\n",
            "hole": b"".join([*lines[: half - 3], *lines[half + 3 :]]),
        }[how]
        log.write_bytes(damaged)
        code = invoke(["analyze", str(run), "-q"])
        results = json.loads((run / "results.json").read_text())
        failed = [sla["detail"] for sla in results["slas"] if sla["verdict"] == "fail"] + [
            (name, finding["witness"])
            for cell in results["cells"]
            for name, finding in cell["invariants"].items()
            if finding["verdict"] == "fail"
        ]
        assert failed == [], log.name
        # the log of a spare that never trained may end anywhere
        assert code == 3 or (code == 0 and b"step_committed" not in kept), log.name
        log.write_bytes(kept)
