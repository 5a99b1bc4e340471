"""A peer that reads printed logs: what it is told, how its result is read, and what goes wrong. The
peer itself is a program that prints what the test says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.arms import hot_spare
from tests.support.running import stand_in
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.attribute import nvrx
from trainchaos.harness.attribute.paper import MANIFEST
from trainchaos.harness.explain.diagnosis import CauseClass, Layer
from trainchaos.harness.explain.strip import write_stripped
from trainchaos.recovery.playbook.entry import Action

RESULT = {
    "schema_version": nvrx.SCHEMA,
    "decision": "RESTART",
    "justification": "Line 2 matched",
    "primary_failure": {"failure_class": "observed_exception", "line": 2, "rank": "3"},
    "selected_observed_failure": None,
}


def peer(folder: Path, said: str, code: int = 0) -> Path:
    """A Python of an environment with a peer that prints this, and keeps what it was asked."""
    return stand_in(
        folder / "python",
        "import pathlib, sys\n"
        f"here = pathlib.Path({str(folder)!r})\n"
        "(here / 'asked').write_text('\\n'.join(sys.argv[1:]))\n"
        "(here / 'read').write_text(pathlib.Path(sys.argv[3]).read_text())\n"
        f"print({said!r})\nsys.exit({code})\n",
    )


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    """A paper of one question: a kill."""
    place = tmp_path / "paper"
    write_stripped(hot_spare().log(), place / "q0001")
    rows = {"version": 1, "questions": [{"id": "q0001", "events": "q0001"}]}
    (place / MANIFEST).write_text(json.dumps(rows))
    return place


def test_a_text_is_what_a_job_prints() -> None:
    log = hot_spare().log()
    lines, at_s = nvrx.text_of(log)
    assert at_s == sorted(at_s)
    assert len(lines) == len(at_s)
    ended = [line for line in lines if "exited with" in line]
    assert len(ended) == 1
    assert "rank 2" in ended[0] and "signal 9" in ended[0]
    steps = [line for line in lines if "iteration" in line]
    assert len(steps) == sum(e.data["rank"] == 0 for e in log.of(Kind.STEP_COMMITTED))
    assert not [line for line in lines if "fault" in line or "blame" in line or "hang" in line]


def test_a_paper_is_answered_by_its_documented_command(paper: Path, tmp_path: Path) -> None:
    python = peer(tmp_path, json.dumps(RESULT))
    found = nvrx.sit(paper, python)
    (answer,) = found.runs["q0001"]
    assert (answer.cause, answer.layer) == (CauseClass.CODE, Layer.APPLICATION)
    assert (answer.rank, answer.node, answer.action) == (3, None, Action.RESTART)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:2] == ["-m", nvrx.MODULE]
    assert asked[3:] == ["--job-id", "q0001", "--cycle-id", "0", "--disable-l1"]
    lines, at_s = nvrx.text_of(hot_spare().log())
    assert (tmp_path / "read").read_text().splitlines() == lines
    assert answer.at_s == pytest.approx(at_s[1])


@pytest.mark.parametrize(
    ("changes", "cause", "rank", "action"),
    [
        ({"failure_class": "cuda_oom"}, CauseClass.MEMORY, 3, Action.RESTART),
        ({"failure_class": "a new one"}, CauseClass.PROCESS_DEATH, 3, Action.RESTART),
        ({"failure_class": None, "rank": None}, CauseClass.PROCESS_DEATH, None, Action.RESTART),
        ({"rank": "3, 4"}, CauseClass.CODE, None, Action.RESTART),
        ({"line": 99}, CauseClass.CODE, 3, Action.RESTART),
        ({"line": None}, CauseClass.CODE, 3, Action.RESTART),
        ({"line": 0}, CauseClass.CODE, 3, Action.RESTART),
    ],
)
def test_results_of_all_shapes(
    changes: dict[str, Any], cause: CauseClass, rank: int | None, action: Action
) -> None:
    failure = {"failure_class": "observed_exception", "line": 2, "rank": "3", **changes}
    (answer,) = nvrx.answer_of({**RESULT, "primary_failure": failure}, [0.5, 1.5, 4.0])
    assert (answer.cause, answer.rank, answer.action) == (cause, rank, action)
    assert answer.at_s == (1.5 if failure["line"] == 2 else 4.0)


def test_what_names_no_failure_says_nothing() -> None:
    assert nvrx.answer_of({**RESULT, "primary_failure": None}, [1.0]) == []


def test_stop_is_for_people() -> None:
    (answer,) = nvrx.answer_of({**RESULT, "decision": "STOP"}, [1.0, 2.0])
    assert answer.action is Action.FIX_CODE


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        ("no JSON", 0, "gave no result"),
        ("[]", 0, "no JSON object"),
        ("{}", 0, "of schema None"),
        (json.dumps({**RESULT, "schema_version": "v9"}), 0, "of schema 'v9'"),
        ("", 3, "exit code 3"),
    ],
)
def test_a_peer_that_cannot_be_read(
    paper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], said: str, code: int, why: str
) -> None:
    python = peer(tmp_path, said, code)
    assert nvrx.main([str(paper), "--python", str(python)]) == 2
    assert why in capsys.readouterr().err


def test_a_peer_that_is_not_there(
    paper: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nvrx.main([str(paper), "--python", str(tmp_path / "none")]) == 2
    assert "gave no result" in capsys.readouterr().err


def test_a_directory_that_is_no_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nvrx.main([str(tmp_path), "--python", sys.executable]) == 2
    assert "no manifest" in capsys.readouterr().err
