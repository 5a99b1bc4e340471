"""Programs that misbehave, and the verdict that each deserves: real runs beside their control arms,
under the invariants that a command has by default.

Who recovers passes, however it prints. Who loses what it learned, hangs, ends early or leaves
something behind because of the fault fails. What it does without a fault too, or what nobody can
know, is left open, or a warning. ``docs/scripts.md`` shows this table.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness.script.test_script import KILL, TERM, command, events, run, write
from trainchaos.chaos.events.log import Kind
from trainchaos.harness.host.rundir import open_run
from trainchaos.harness.script.processes import leftovers
from trainchaos.reports.outlets.terminal import summary

pytestmark = pytest.mark.real

PASS, FAIL, OPEN = "pass", "fail", "inconclusive"
LINES = r"{regex: 'step (?P<step>\d+) loss (?P<loss>\S+)'}"
RANKED = LINES.replace("'step", r"'default(?P<rank>\d+)\]:step")
SKIPPING = LINES.replace("}", ", skip: evaluation}")
NUMBERS = LINES.replace(r"\S", "[0-9.]")
RANK_0 = KILL.replace("rank: 1", "rank: 0")
HANGS = "6s"
"""A deadline of jobs that do hang."""


class Row(NamedTuple):
    """``options``: of the fake trainer; ``said``: to a reader, of the verdict or of the fault."""

    options: str
    verdict: str
    said: str
    progress: str = LINES
    fault: str = KILL
    deadline: str = "120s"
    ranks: int = 2


BEGUN_AGAIN = "began again from step 1, and"
OTHER_WEIGHTS = "as if it had begun with other weights"
STILL = "the loss was 1.0 in each of"
ENDED = "the command ended with exit code 0 at step 20 of 30"
NOT_EITHER = "gave-up at step 20 of 30, and the control arm did not either"
FEWER = "1 of 2 ranks at the end: "
BY_NOBODY = "steps 12 to 25 were reported by nobody"

TABLE = {
    "good": Row("", PASS, "recovered"),
    # how it prints
    "every rank": Row("--prints all", PASS, "recovered"),
    "every rank, some lag": Row("--prints lag", PASS, "recovered", ranks=4),
    "every rank by its number, some lag": Row("--prints lag", PASS, "recovered", RANKED),
    "every rank, and evaluation": Row("--prints eval", PASS, "recovered", SKIPPING),
    "every rank, and evaluation as steps": Row("--prints eval", OPEN, "step of the epoch?"),
    "two ranks in a line": Row("--prints torn", PASS, "recovered"),
    "each line twice": Row("--prints twice", PASS, "recovered"),
    "each line twice by its rank": Row("--prints twice", PASS, "recovered", RANKED),
    "another order": Row("--prints swapped", PASS, "recovered"),
    "another order by its rank": Row("--prints swapped", PASS, "recovered", RANKED),
    "first line late": Row("--first-late-s 1", PASS, "recovered"),
    "late answer": Row("--answers 3 --answers-late-s 1", PASS, "recovered", fault=TERM),
    # ranks
    "half of the ranks": Row("--named 1", OPEN, "1 of 2 ranks were found", fault=RANK_0),
    "survivors": Row("--survives", PASS, f"degraded  hit in default, repeat 0: {FEWER}w1 gone"),
    "survivors by their number": Row(
        "--survives --prints lag", PASS, f"{FEWER}rank 0 gone", RANKED, RANK_0
    ),
    # what it had done
    "scratch": Row("--save-every 99", FAIL, BEGUN_AGAIN),
    "scratch, every rank lags": Row("--save-every 99 --prints lag", FAIL, BEGUN_AGAIN),
    "scratch in another order": Row("--save-every 99 --prints swapped", FAIL, BEGUN_AGAIN, RANKED),
    "amnesia": Row("--loses weights", FAIL, OTHER_WEIGHTS),
    "amnesia, every rank": Row("--loses weights --prints all", FAIL, OTHER_WEIGHTS, RANKED),
    "skip": Row("--skip 15", OPEN, BY_NOBODY),
    "skip, some lag": Row("--skip 15 --prints lag", OPEN, BY_NOBODY),
    "skip, by the beacon": Row(
        "--skip 15 --beacon", FAIL, "steps 12 to 25 were left out", "beacon"
    ),
    "ghost": Row("--loses all", FAIL, STILL),
    "ghost of survivors": Row("--survives --loses all", FAIL, STILL),
    "ghost in the launcher": Row("--ghost", OPEN, "ended, yet the steps went on to 30"),
    "ghost without a fault too": Row("--loss 1.0", OPEN, "nothing shows that the job learns"),
    # losses that are not numbers, and that are not read
    **{
        f"loss {loss}": Row(f"--again --loss={loss}", FAIL, "the control arm had 0.090909")
        for loss in ("nan", "NaN", "NAN", "-nan", "nan.0", "inf", "'-inf'")
    },
    "loss nan without a fault too": Row("--loss nan", FAIL, "losses that are not numbers: nan"),
    "loss nan, of which no line is read": Row(
        "--again --loss nan", OPEN, "the lines changed their form", NUMBERS
    ),
    "loss unread": Row("--again --loss 4,47", OPEN, "20 losses could not be read, such as '4,47'"),
    # its end
    "early end": Row("--again --ends-at 20", FAIL, ENDED),
    "early end without a fault too": Row("--ends-at 20", OPEN, NOT_EITHER),
    "hang": Row("--again --hang-at 20", FAIL, "timed-out at step 19 of 30", deadline=HANGS),
    "hang without a fault too": Row(
        "--hang-at 25", OPEN, "the command fails without any fault", deadline=HANGS
    ),
    "slow": Row("--slower-s 0.3", FAIL, "of the rate of the control arm"),
    "orphan": Row("--again --daemon", FAIL, "the command ended well and left sleep"),
    "orphan without a fault too": Row(
        "--daemon", PASS, "warning: the command ended well and left sleep"
    ),
    "shared memory": Row("--again --shared", FAIL, "the command left fake_trainer_"),
    "shared memory without a fault too": Row(
        "--shared", PASS, "warning: the command left fake_trainer_"
    ),
}


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.sample(4)
def test_a_program_gets_the_verdict_that_it_deserves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    row = TABLE[name]
    if "--daemon" in row.options:
        monkeypatch.setattr(leftovers, "LINGER_S", 0.5)
    usual = ["--steps", "30", "--late-s", "0.15", "--ranks", str(row.ranks)]
    restarts = [] if {"--survives", "--ghost"} & {*row.options.split()} else ["--restarts", "2"]
    scenario = write(
        tmp_path / "s.yaml",
        command(*usual, *restarts, *row.options.split()),
        fault=row.fault,
        progress=row.progress,
        ranks=row.ranks,
        deadline=row.deadline,
        baseline="paired",
        invariants="observable",
    )
    code, results = run(tmp_path, scenario)
    if code == 0 and results.verdict == OPEN:
        return  # by the machine alone, which was too busy to tell
    shown = summary(results, open_run(tmp_path / "runs/script/latest"))
    outcomes = [fault.outcome for fault in results.faults]
    assert (results.verdict, row.said in f"{shown}\n{outcomes}") == (row.verdict, True), shown
    assert len(events(tmp_path, Kind.FAULT_INJECTED)) == 1, "it is not struck again"
