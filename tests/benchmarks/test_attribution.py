"""The exam of diagnosers: its questions, its truths, its scores, its files, and a peer that reads
printed logs.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.attribution import nvrx
from benchmarks.attribution.__main__ import main
from benchmarks.attribution.exam import (
    CATALOGUE,
    STRATEGIES,
    UNFAULTED,
    ExamError,
    Incident,
    Key,
    Keyed,
    incidents_of,
    questions,
    read,
)
from benchmarks.attribution.score import ASPECTS, Answers, Score, page, score, share
from tests.benchmarks.exam import ALL, Played, sat
from tests.support.arms import hot_spare
from tests.support.running import stand_in
from trainchaos.chaos import plugins
from trainchaos.chaos.events.log import Kind
from trainchaos.chaos.fault.base import Fault
from trainchaos.harness.explain.diagnose import diagnose
from trainchaos.harness.explain.diagnosis import CauseClass, DiagnosedIncident, Layer
from trainchaos.recovery.health.signs import entry_of
from trainchaos.recovery.playbook.entry import Action

RANKS = 4
TRUTHS = sorted(CATALOGUE.truth)

# --- the catalogue


def test_each_kind_of_fault_has_variants_and_each_variant_a_truth() -> None:
    assert CATALOGUE.kind.keys() == plugins.load(plugins.FAULTS, Fault).keys()
    used = {one.truth for variants in CATALOGUE.kind.values() for one in variants}
    instead = {name for one in CATALOGUE.truth.values() for name in one.instead.values()}
    assert used | instead == CATALOGUE.truth.keys()
    assert {one.causes[0] for one in CATALOGUE.truth.values()} == set(CauseClass)


def test_a_device_is_told_to_fail_where_the_health_source_is_believed() -> None:
    for one in CATALOGUE.kind["health-event"]:
        entry = entry_of(one.params["what"], one.params["code"])
        assert one.truth == ("device" if entry is not None and entry.move else "device-warning")


# --- questions


def test_questions_are_those_of_the_seed_and_numbered_without_order() -> None:
    asked = questions(ALL, STRATEGIES, runs=1, seed=1, unfaulted=4)
    assert asked == questions(ALL, STRATEGIES, runs=1, seed=1, unfaulted=4)
    assert asked != questions(ALL, STRATEGIES, runs=1, seed=2, unfaulted=4)
    assert [one.id for one in asked] == [f"q{n:04}" for n in range(1, len(asked) + 1)]
    assert [one.kind for one in asked] != sorted(one.kind for one in asked)
    assert sum(one.kind == UNFAULTED for one in asked) == 4


@pytest.mark.parametrize(
    ("names", "strategies"), [(["late-kill"], ["hot-spare"]), (["process-kill"], ["none"])]
)
def test_unknown_kinds_and_strategies_are_refused(names: list[str], strategies: list[str]) -> None:
    with pytest.raises(ExamError, match="unknown") as caught:
        questions(names, strategies, runs=1, seed=1)
    assert caught.value.exit_code == 2


def scored(sittings: Played) -> Score:
    """The score of the built-in diagnosis."""
    keys, answers = [], {}
    for number, (question, log) in enumerate(sittings):
        incidents = incidents_of(log, question)
        assert len(incidents) == len(question.tree["faults"]), question
        about = {"kind": question.kind, "strategy": question.strategy}
        keys.append(Keyed(id=f"{question.id}.{number}", **about, incidents=incidents))
        answers[keys[-1].id] = diagnose(log)
    return score(keys, Answers(tool="ours", runs=answers))


@pytest.mark.slow
def test_some_kinds_are_told_from_their_logs() -> None:
    found = scored(sat())
    assert found.mistakes == [] and found.innocent == 0 and found.unfaulted_said.right == 0


@pytest.mark.slow
def test_the_truth_goes_by_phase_and_strategy() -> None:
    for question, log in sat():
        other = question.model_copy(update={"strategy": "checkpoint-restart"})
        for one, again in zip(incidents_of(log, question), incidents_of(log, other), strict=True):
            if one.kind == "rank-hang":
                assert (CauseClass.DATA in one.truth.causes) == (one.phase == "data")
            if one.kind == "node-stop":
                assert one.truth.places == ("node",) and one.nodes and one.members
                assert again.truth.places == ("node", "member")


@pytest.mark.long
def test_the_catalogue_is_told_from_its_logs() -> None:
    more = sat(("checkpoint-corrupt",), "checkpoint-restart", 0)
    found = scored(sat(ALL, unfaulted=3) + more + sat(("spare-kill",), "hot-spare", 0))
    assert found.kinds.keys() | found.traceless.keys() == CATALOGUE.kind.keys()
    place, cause = found.overall["place"], found.overall["cause"]
    assert place.right >= 0.95 * place.n, found.mistakes
    assert cause.right >= 0.95 * cause.n, found.mistakes
    assert found.innocent == 0
    assert all(one.right == one.n for one in found.traceless.values())
    assert (found.unfaulted_said.right, found.unfaulted_said.n) == (0, 3)


# --- scores


def keyed(number: int, name: str, rng: random.Random, **changes: Any) -> Keyed:
    """A question with one incident of that truth at a rank."""
    rank = rng.randrange(RANKS)
    truth = CATALOGUE.truth[name].model_copy(
        update={"trace": "events", "places": ("rank",), **changes}
    )
    one = Incident(
        fault="asked",
        kind=name,
        at_s=1.0,
        step=25,
        phase=None,
        truth=truth,
        ranks=(rank,),
        nodes=(),
        members=(rank,),
    )
    return Keyed(id=f"q{number:04}", kind=name, strategy="hot-spare", incidents=[one])


def exam(n: int = 400) -> list[Keyed]:
    """Questions over all truths."""
    rng = random.Random(1)
    return [keyed(number, TRUTHS[number % len(TRUTHS)], rng) for number in range(1, n + 1)]


def answer(key: Keyed, **changes: Any) -> DiagnosedIncident:
    """The most exact answer."""
    (one,) = key.incidents
    right = {
        "at_s": 1.1,
        "cause": one.truth.causes[0],
        "rank": one.ranks[0],
        "layer": one.truth.layers[0],
        "action": one.truth.actions[0],
    }
    return DiagnosedIncident(**{**right, **changes})


def test_a_perfect_tool_is_right_in_everything() -> None:
    keys = exam()
    found = score(keys, Answers(tool="perfect", runs={key.id: [answer(key)] for key in keys}))
    assert all((one.right, one.n) == (400, 400) for one in found.overall.values())
    assert set(found.overall) == set(ASPECTS)
    assert not found.extra and not found.missing and not found.mistakes
    assert all(list(row) == [cause] for cause, row in found.confusion.items())
    assert "| cause | 400 | 400 | 100 | 99, 100 |" in page(found, {"date": "2026-01-01"})


@pytest.mark.parametrize(
    ("changes", "right", "extra", "innocent"),
    [
        ({"at_s": 0.5}, False, 1, 0),  # before the fault
        ({"at_s": 0.8}, True, 0, 0),
        ({"rank": None, "node": 1}, True, 0, 0),
    ],
)
def test_an_answer_before_the_fault_is_of_no_incident(
    changes: dict[str, Any], right: bool, extra: int, innocent: int
) -> None:
    (key,) = exam(1)
    found = score([key], Answers(tool="x", runs={key.id: [answer(key, **changes)]}))
    assert (found.overall["cause"].right, found.extra, found.innocent) == (right, extra, innocent)
    assert found.overall["place"].right == (right and "node" not in changes)


def test_blame_of_an_innocent_is_counted() -> None:
    (key,) = exam(1)
    other = answer(key, rank=key.incidents[0].ranks[0] + 1)
    found = score([key], Answers(tool="x", runs={key.id: [answer(key), other]}))
    assert (found.extra, found.innocent, found.overall["place"].right) == (1, 1, 1)


def test_unfaulted_runs_count_what_is_said_and_who_is_blamed() -> None:
    keys = [Keyed(id=f"q{n}", kind=UNFAULTED, strategy="x", incidents=[]) for n in range(100)]
    blames = answer(exam(1)[0])
    runs = {"q1": [blames], "q2": [answer(exam(1)[0], rank=None)]}
    found = score(keys, Answers(tool="x", runs=runs | {f"q{n}": [] for n in range(3, 100)}))
    assert (found.unfaulted_blamed.right, found.unfaulted_blamed.n) == (1, 100)
    assert found.unfaulted_said.right == 2
    assert 0.05 < found.unfaulted_blamed.high < 0.06  # Clopper-Pearson of 1 of 100: 5.45 %


def test_a_fault_without_a_trace_is_right_when_nothing_is_said() -> None:
    key = keyed(1, "clock", random.Random(1), trace="none")
    quiet = score([key], Answers(tool="x", runs={key.id: []}))
    loud = score([key], Answers(tool="x", runs={key.id: [answer(key)]}))
    assert quiet.overall["cause"].n == loud.overall["cause"].n == 0
    assert (quiet.traceless["clock"].right, loud.traceless["clock"].right) == (1, 0)


def test_the_truth_is_a_set_and_the_exact_cause_its_first() -> None:
    key = keyed(1, "dead-of-memory", random.Random(3))
    said = answer(key, cause=CauseClass.PROCESS_DEATH)
    found = score([key], Answers(tool="x", runs={key.id: [said]}))
    assert (found.overall["cause"].right, found.overall["exact cause"].right) == (1, 0)
    assert found.confusion == {"memory": {"process-death": 1}}
    assert found.mistakes == []


def test_figures_are_rounded_away_from_what_was_not_shown() -> None:
    assert share([True] * 999 + [False]).percent == "99.9"
    assert share([True] * 999 + [False]).interval == "99.4, 100"
    assert share([True] * 899 + [False]).percent == "99.8"
    assert (share([]).percent, share([]).interval) == ("-", "0, 100")


# --- files

GOOD: dict[str, Any] = {
    "at_s": 1.5,
    "cause": "hang",
    "rank": 2,
    "layer": "application",
    "action": "restart",
}


def written(path: Path, tree: object) -> Path:
    """A file with that JSON."""
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"cause": "gremlins"}, r"runs\.q0001\.1\.cause"),
        ({"rank": -1}, r"runs\.q0001\.1\.rank"),
        ({"layer": None}, r"runs\.q0001\.1\.layer"),
        ({"node": 1}, r"runs\.q0001\.1[\s\S]*a rank or a node, not both"),
        ({"at_s": float("inf")}, r"runs\.q0001\.1\.at_s"),
        ({"who": "me"}, r"runs\.q0001\.1\.who"),
    ],
)
def test_a_wrong_entry_is_named(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    runs = {"q0001": [GOOD, {**GOOD, **change}]}
    path = written(tmp_path / "a.json", {"version": 1, "tool": "x", "runs": runs})
    with pytest.raises(ExamError, match=named) as caught:
        read(path, Answers)
    assert caught.value.exit_code == 2


@pytest.mark.slow
def test_a_paper_has_no_answers_and_is_scored_with_its_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["process-kill", "gpu-oom", "exception"]
    into = ["--into", str(tmp_path / "exam")]
    options = ["--kinds", ",".join(asked), "--strategy", "hot-spare", "--unfaulted", "1"]
    assert main([*options, *into]) == 0
    said = capsys.readouterr().out
    assert "| cause | 3 | 3 | 100 |" in said
    logs = sorted((tmp_path / "exam" / "paper").rglob("*.jsonl"))
    everything = "".join(path.read_text() for path in logs)
    assert not [kind for kind in ALL if f'"{kind}"' in everything] and "inject" not in everything
    assert len(read(tmp_path / "exam" / "paper.key.json", Key).questions) == 4
    answers = (tmp_path / "exam" / "answers.json").rename(tmp_path / "answers.json")
    assert main([*into, "--answers", str(answers)]) == 0
    assert capsys.readouterr().out == said
    assert main([*options, *into]) == 2
    assert "no exam yet" in capsys.readouterr().err


# --- a peer that reads printed logs: a program that prints what the test says

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


def test_a_log_is_answered_by_the_documented_command(tmp_path: Path) -> None:
    log = hot_spare().log()
    (found,) = nvrx.ask(peer(tmp_path, json.dumps(RESULT)), "q0001", log)
    assert (found.cause, found.layer) == (CauseClass.CODE, Layer.APPLICATION)
    assert (found.rank, found.node, found.action) == (3, None, Action.RESTART)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:2] == ["-m", nvrx.MODULE]
    assert asked[3:] == ["--job-id", "q0001", "--cycle-id", "0", "--disable-l1"]
    lines, at_s = nvrx.text_of(log)
    assert (tmp_path / "read").read_text().splitlines() == lines
    assert found.at_s == pytest.approx(at_s[1]) and at_s == sorted(at_s)
    (ended,) = [line for line in lines if "exited with" in line]
    assert "rank 2" in ended and "signal 9" in ended
    steps = [line for line in lines if "iteration" in line]
    assert len(steps) == sum(e.data["rank"] == 0 for e in log.of(Kind.STEP_COMMITTED))
    assert not [line for line in lines if "fault" in line or "blame" in line or "hang" in line]


@pytest.mark.parametrize(
    ("changes", "cause", "rank"),
    [
        ({"failure_class": "cuda_oom"}, CauseClass.MEMORY, 3),
        ({"failure_class": "a new one"}, CauseClass.PROCESS_DEATH, 3),
        ({"failure_class": None, "rank": None}, CauseClass.PROCESS_DEATH, None),
        ({"rank": "3, 4"}, CauseClass.CODE, None),
        ({"line": 99}, CauseClass.CODE, 3),
        ({"line": None}, CauseClass.CODE, 3),
        ({"line": 0}, CauseClass.CODE, 3),
    ],
)
def test_results_of_all_shapes(
    changes: dict[str, Any], cause: CauseClass, rank: int | None
) -> None:
    failure = {"failure_class": "observed_exception", "line": 2, "rank": "3", **changes}
    (found,) = nvrx.answer_of({**RESULT, "primary_failure": failure}, [0.5, 1.5, 4.0])
    assert (found.cause, found.rank, found.action) == (cause, rank, Action.RESTART)
    assert found.at_s == (1.5 if failure["line"] == 2 else 4.0)
    (stopped,) = nvrx.answer_of({**RESULT, "decision": "STOP"}, [1.0, 2.0])
    assert stopped.action is Action.FIX_CODE
    assert nvrx.answer_of({**RESULT, "primary_failure": None}, [1.0]) == []


@pytest.mark.parametrize(
    ("said", "code", "why"),
    [
        ("no JSON", 0, "Expecting value"),
        ("[]", 0, "not of schema"),
        (json.dumps({**RESULT, "schema_version": "v9"}), 0, "not of schema"),
        ("", 3, "exit status 3"),
    ],
)
def test_a_peer_that_cannot_be_read(tmp_path: Path, said: str, code: int, why: str) -> None:
    with pytest.raises(ExamError, match=f"the restart agent gave no result: .*{why}"):
        nvrx.ask(peer(tmp_path, said, code), "q0001", hot_spare().log())
    with pytest.raises(ExamError, match="gave no result"):
        nvrx.ask(tmp_path / "none", "q0001", hot_spare().log())
