"""``chaos fuzz --what judge``: how logs are changed, what is claimed of them, and that a lenient
checker is found.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trainchaos.chaos.cli import build_catalogue
from trainchaos.chaos.events.log import Kind, Log
from trainchaos.harness.fuzz.draw.draw import Dice, World
from trainchaos.harness.fuzz.judge import changes as changing
from trainchaos.harness.fuzz.judge import neutral
from trainchaos.harness.fuzz.judge.bench import BaseRun, JudgeBench, JudgeView, base_of, stored
from trainchaos.harness.fuzz.judge.claims import Claims, alike, altered, backwards
from trainchaos.harness.fuzz.judge.judge import ENDING, JudgeFind, JudgeSearch, replayed
from trainchaos.harness.fuzz.judge.lines import ARMS, LogEdit, changed
from trainchaos.harness.fuzz.play.oracle import Find
from trainchaos.harness.fuzz.play.play import SimPlayer, kinds, strategies
from trainchaos.harness.judge import checkers
from trainchaos.harness.judge.evidence.evidence import Evidence, failed, passed
from trainchaos.harness.judge.results import Finding
from trainchaos.harness.judge.verdict.judge import judge

CATALOGUE = build_catalogue()
WORLD = World(kinds=kinds(), strategies=strategies())
FOLDER = Path(__file__).resolve().parents[3] / "scenarios" / "regressions"
REGRESSIONS = sorted(FOLDER.glob(f"*{ENDING}"))
COMMIT, TAKEN, EXIT = Kind.STEP_COMMITTED, Kind.BATCH_TAKEN, Kind.PROCESS_EXITED
TREE: dict[str, Any] = {
    "version": 1,
    "name": "fuzz",
    "seed": 5,
    "launcher": {"kind": "sim", "nodes": 1},
    "workload": {
        "kind": "mlp",
        "ranks": 3,
        "steps": 16,
        "parallelism": "ddp",
        "global_batch": 6,
        "checkpoint": {"every": 4},
    },
    "recovery": {"strategy": "hot-spare"},
    "faults": [{"id": "f0", "kind": "process-kill", "at": {"step": 6}, "target": {"rank": 1}}],
    "stop_conditions": [{"when": "no_committed_step_for > 120s"}],
}


@cache
def base() -> BaseRun:
    """A run in which everything passes."""
    found = base_of(TREE, SimPlayer(catalogue=CATALOGUE).play(TREE))
    assert found is not None
    return found


def faulted() -> Log:
    return base().logs["faulted"]


def look(*changes: LogEdit, whole: bool = False) -> JudgeView:
    return JudgeBench().look(base(), changes, whole=whole)


def one_of(kind: Kind, nth: int = 0, **more: Any) -> LogEdit:
    return LogEdit(kind=kind, nth=nth, **more)


# ---- changing


def test_a_log_without_changes_is_itself_and_one_with_vain_ones_equals_it() -> None:
    assert changed(faulted(), []) is faulted()
    vain = LogEdit(do="move", kind=COMMIT, actor="nobody", by=5)
    assert changed(faulted(), [vain]).events == faulted().events
    assert look(vain).same


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (one_of(COMMIT, do="drop"), -1),
        (one_of(COMMIT, do="double"), 1),
        (LogEdit(do="drop", kind=TAKEN, step=3), -3),
        (one_of(COMMIT, do="move", by=1.5), 0),
        (one_of(COMMIT, do="actor", by="orchestrator"), 0),
        (one_of(COMMIT, do="step", by=1), 0),
        (one_of(COMMIT, do="generation", by=1), 0),
        (one_of(COMMIT, do="data", path=("loss",), how="scale", by=2), 0),
        (one_of(TAKEN, do="data", path=("samples",), how="shorten"), 0),
        (one_of(TAKEN, do="data", path=("samples", 0), how="add", by=1), 0),
        (one_of(EXIT, do="data", path=("expected",), how="flip"), 0),
        (LogEdit(kind=EXIT, do="data", how="swap", by=("w0", "w1")), 0),
    ],
    ids=lambda value: value.about if isinstance(value, LogEdit) else str(value),
)
def test_what_is_changed_is_in_order_and_numbered_again(change: LogEdit, count: int) -> None:
    before = [event.to_line() for event in faulted().events]
    made = changed(faulted(), [change])
    assert len(made.events) == len(before) + count and made.events != faulted().events
    assert made.problems == ()
    for actor in made.actors.values():
        assert [event.seq for event in actor.events] == list(range(len(actor.events)))
        assert [event.time_ns for event in actor.events] == sorted(
            event.time_ns for event in actor.events
        )
    assert [event.to_line() for event in faulted().events] == before


def test_changes_are_read_back_as_they_were_written() -> None:
    dice = Dice(rng=random.Random(3))
    for _ in range(200):
        for change in changing.draw(dice, dict(base().logs)):
            assert LogEdit.model_validate(change.plain()) == change


def test_every_change_and_every_kind_of_line_is_drawn() -> None:
    dice = Dice(rng=random.Random(3))
    drawn = [change for _ in range(600) for change in changing.draw(dice, dict(base().logs))]
    assert {change.do for change in drawn} == set(changing.DONE)
    assert {change.arm for change in drawn} == set(ARMS)
    assert {change.kind for change in drawn} >= {event.kind for event in faulted().events}


# ---- claims


def test_what_is_claimed_otherwise_is_said() -> None:
    before = Claims(exact={"outcome": "completed"}, near={"recovery_time": (1.0,)})
    after = Claims(exact={"outcome": "gave-up"}, near={"recovery_time": (1.3,)})
    assert altered(before, before) == []
    assert altered(before, after) == [
        "outcome was 'completed', is 'gave-up'",
        "recovery_time was 1, is 1.3",
    ]
    assert altered(before, after, times=False) == ["outcome was 'completed', is 'gave-up'"]
    assert altered(before, Claims(exact={}, near={"recovery_time": ()})) == [
        "outcome was 'completed', is None",
        "recovery_time had 1 values, has 0",
    ]
    assert [alike(1, 1.14), alike(1, 1.16), alike(1, float("inf"))] == [True, False, False]


def test_effects_before_their_causes_are_named() -> None:
    assert backwards(faulted()) == set()
    landed = changed(faulted(), [one_of(Kind.FAULT_LANDED, do="move", by=-5000)])
    assert backwards(landed) == {"fault_landed of f0 before fault_injected of f0"}


def test_the_judge_sees_the_run_as_it_is_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    results = judge(stored(tmp_path / "run", base().cell, base().logs))
    assert (results.verdict, results.reason) == ("pass", results.reason)
    assert "faulted: fault-landed" in look(one_of(Kind.FAULT_LANDED, do="drop")).seen
    assert look(one_of(COMMIT, do="generation", by=2**62)).seen.keys() == {"faulted: senseless"}
    assert look(one_of(EXIT, do="drop"), whole=True).find is None


@pytest.mark.slow
def test_what_changes_nothing_is_judged_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JudgeBench().neutral(base()) is None

    def early(evidence: Evidence) -> Finding:
        return (
            failed("late")
            if evidence.log.events[0].time_ns > faulted().events[0].time_ns
            else passed("early")
        )

    with monkeypatch.context() as patched:
        patched.setitem(checkers._ALL, "liveness", early)
        found = JudgeBench().neutral(base())
        assert found is not None and found.key.startswith("not alike: all times later: ")
    monkeypatch.setitem(
        neutral.WRITTEN, "wrong", lambda line: line.replace('"exit_code":0', '"exit_code":1')
    )  # type: ignore[arg-type]
    found = JudgeBench().neutral(base())
    assert found is not None and found.key == "not alike: wrong"


# ---- finding


def pass_all(evidence: Evidence) -> Finding:
    return passed("as it should be")


def lenient(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(checkers._ALL, name, pass_all)


def searched(most: int, seed: str = "planted") -> JudgeSearch:
    search = JudgeSearch(
        world=WORLD, player=SimPlayer(catalogue=CATALOGUE), bench=JudgeBench(), seed=seed
    )
    for _ in range(most):
        if search.step() is not None:
            break
    return search


def test_what_a_lenient_checker_lets_pass_is_a_find(monkeypatch: pytest.MonkeyPatch) -> None:
    swap = one_of(TAKEN, do="data", path=("samples", 0), how="add", by=1)
    assert look(swap).find is None
    lenient(monkeypatch, "sample-accounting")
    found = look(swap).find
    assert found is not None and found.key.startswith(
        "unseen: faulted: samples_lost by data batch_taken samples"
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["sample-accounting", "landing"])
def test_a_lenient_checker_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In 1500 changes: of three searches, as one alone may be unlucky for long."""
    lenient(monkeypatch, name)
    finds = [find for seed in ("a", "b", "c") for find in searched(500, seed).finds.values()]
    assert finds and all(
        len(one.changes) == 1 and one.find.key.startswith("unseen: ") for one in finds
    )


@pytest.mark.slow
@pytest.mark.long
def test_what_is_right_shows_nothing() -> None:
    search = searched(120, seed="right")
    assert {key: found.find.text for key, found in search.finds.items()} == {}
    assert search.runs > 60 and search.coverage.rows()


@pytest.mark.slow
def test_what_is_right_shows_nothing_in_a_run() -> None:
    """In changes of one; other runs are drawn in the test before."""
    search = JudgeSearch(
        world=WORLD, player=SimPlayer(catalogue=CATALOGUE), bench=JudgeBench(), seed="right"
    )
    search._base, search._left = base(), 25
    for _ in range(25):
        search.step()
    assert {key: found.find.text for key, found in search.finds.items()} == {}
    assert search.runs > 12 and search.coverage.rows()


@pytest.mark.slow
def test_a_find_is_kept_as_a_file_that_shows_it_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    swap = one_of(TAKEN, do="data", path=("samples", 0), how="add", by=1)
    kept = JudgeFind(
        find=Find(key="k", text="samples_lost was 0"), tree=TREE, changes=(swap,), plays=0
    )
    ((name, content),) = kept.files().items()
    (tmp_path / name).write_bytes(content)
    player = SimPlayer(catalogue=CATALOGUE)
    assert name.endswith(ENDING) and replayed(tmp_path / name, player, JudgeBench()) is None
    lenient(monkeypatch, "sample-accounting")
    again = replayed(tmp_path / name, player, JudgeBench())
    assert again is not None and again.key.startswith("unseen")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("path", REGRESSIONS, ids=lambda path: path.stem)
def test_what_was_unseen_once_is_seen(path: Path) -> None:
    found = replayed(path, SimPlayer(catalogue=CATALOGUE), JudgeBench())
    assert found is None, found.text
