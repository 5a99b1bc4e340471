"""Runs that were stored before the rooms had floors (commit e64914e) are judged as they were then.

``stored/*.tar.xz``: what judging reads of a run, and its ``results.json``: four cells with real
ranks, four simulated ones, and a command that torchrun starts.
"""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.portions import long_but
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.scenario.model import RETIRED_INVARIANTS
from trainchaos.harness.judge.measure.measure import summarise

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
    before = json.loads(
        (run / "results.json")
        .read_text()
        .replace("of the control arm's rate, for", "of the rate of the control arm, for")
        .replace(
            "of the this arm before its first fault's rate", "of the rate of this arm as a whole"
        )
    )
    (run / "results.json").unlink()
    assert invoke(["analyze", str(run), "-q"]) == before["exit_code"] == 0
    assert leaves(json.loads((run / "results.json").read_text())) == leaves(as_now(before))


KEPT = {
    "verdict": "pass",
    "witness": "the job went back 1 times, never to its first step; after the recovery the loss"
    " from step 31 on is 0.4341, the control arm's 0.4341 (band 0.22)",
}


def as_now(before: dict[str, Any]) -> dict[str, Any]:
    """What results say since then: whether they are those of a simulation, and that nobody but the
    simulation bore witness there; whether it is sealed; whether a command began again, beside a
    limit of lost steps; and limits in steps.
    """
    simulated = any(line.startswith("sim: ") for line in before["fidelity"])
    for fault in before["faults"] if simulated else ():
        fault["witness"] = f"simulated {fault['witness']}"
    for fault in before["faults"]:  # progress was not seen in steps of several
        fault["steps_lost_unsure"] = None
    none = {"state": "none", "root": "", "problems": []}
    now = {**before, "simulated": simulated, "seal": none, "unsealed": False}
    for arm in now["arms"]:
        arm["others"] = None
    _retire(now)
    now["workload"] = {**now["workload"], "backend": "auto", "children": "take"}
    for one in now["slas"]:  # no limit was in steps
        one |= {"step_s": [], "observed_s": None}
    for one in now["cells"]:  # no health detectors watched these
        of = {key: one["metrics"]["goodput"][key] for key in ("of", "of_arms")}
        empty = summarise("alarms_unexplained", []).model_dump(mode="json")
        one["metrics"]["alarms_unexplained"] = empty | of
    if "torchrun" in before["reproduce"]:
        (cell,) = now["cells"]
        now["arms"][0]["invariants"]["kept-progress"] = KEPT
        cell["invariants"]["kept-progress"] = {**KEPT, "witness": f"r0.faulted: {KEPT['witness']}"}
        _retire(now)
    return now


def _retire(now: dict[str, Any]) -> None:
    """Without invariants that are no longer judged."""
    for one in (*now["arms"], *now["cells"]):
        one["invariants"] = {
            n: f for n, f in one["invariants"].items() if n not in RETIRED_INVARIANTS
        }
    counts = [len(cell["invariants"]) for cell in now["cells"]]
    for cell, count in zip(now["cells"], counts, strict=True):
        cell["reason"] = re.sub(r"\d+ invariants", f"{count} invariants", cell["reason"])
    every = sum(counts)
    now["reason"] = re.sub(r"\d+ of \d+ inv", f"{every} of {every} inv", now["reason"])


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
