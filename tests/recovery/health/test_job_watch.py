"""What a supervisor reads of its ranks' logs, and what the job's detectors make of it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.costs import calls
from trainchaos.chaos.events.log import ORCHESTRATOR, EventWriter, Kind
from trainchaos.recovery.health import rank_logs
from trainchaos.recovery.health.detector import Alarm
from trainchaos.recovery.health.job_watch import JobDetectors
from trainchaos.recovery.health.rank_logs import HOLD_S, MOST_STEPS, RankLogs
from trainchaos.recovery.health.readings import JOB, Place, Reading
from trainchaos.recovery.health.service import HealthService

STEP_S = 0.04
NS = 1e9


class Ranks:
    """Ranks that write their logs, step by step, on a clock of the test's."""

    def __init__(self, events: Path, ranks: int = 4) -> None:
        self.now_s, self.step, self.generation = 1000.0, 0, 1
        self.events = events
        self._rng = random.Random(1)
        self.writers = {rank: self.writer(f"w{rank}") for rank in range(ranks)}

    def writer(self, name: str) -> EventWriter:
        return EventWriter(self.events, name, lambda: int(self.now_s * NS))

    def commit(
        self,
        *,
        slow: Callable[[int], float] = lambda rank: 1.0,
        ranks: Sequence[int] | None = None,
        **other: Any,
    ) -> None:
        """All commit a step."""
        self.step += 1
        own = {rank: 0.03 * slow(rank) * self._rng.gauss(1.0, 0.03) for rank in self.writers}
        self.now_s += max(own.values()) + 0.01
        for rank in self.writers if ranks is None else ranks:
            writer = self.writers[rank]
            writer.generation = self.generation
            writer.write(Kind.BATCH_TAKEN, step=self.step, rank=rank, epoch=0, samples=[1, 2])
            writer.write(
                Kind.STEP_COMMITTED,
                step=self.step,
                **{
                    "rank": rank,
                    "world": len(self.writers),
                    "samples": 16,
                    "loss": self._rng.gauss(2.0, 0.05) if "loss" not in other else other["loss"],
                    "lr": 0.1,
                    "grad_norm": 1.0 + 0.1 * self._rng.random(),
                    "optimizer_step": self.step,
                    "scheduler_step": self.step,
                    "seconds": {
                        "data": 0.001,
                        "forward": own[rank] / 3,
                        "backward": own[rank] / 3,
                        "collective": max(own.values()) - own[rank] + 0.01,
                        "optimizer": own[rank] / 3,
                    },
                }
                | other,
            )

    def digest(self, rank: int, text: str) -> None:
        self.writers[rank].write(
            Kind.STATE_DIGEST,
            step=self.step,
            rank=rank,
            parameters=text,
            optimizer="",
            scheduler="",
            rng="",
        )


def metrics(readings: Sequence[Reading]) -> set[tuple[Place, str]]:
    return {(one.where, one.metric) for one in readings}


def test_what_all_ranks_know_is_told_once_and_what_is_theirs_of_each(tmp_path: Path) -> None:
    ranks, logs = Ranks(tmp_path), RankLogs(tmp_path)
    for _ in range(3):
        ranks.commit()
    assert not logs.read(ranks.now_s), "other ranks' lines may come yet"
    readings = logs.read(ranks.now_s + 1.0)
    shared = [one for one in readings if one.where == JOB]
    assert [one.metric for one in shared].count("loss") == 3
    assert [one.metric for one in shared].count("throughput") == 2
    assert {(Place(rank), "compute") for rank in range(4)} <= metrics(readings)
    assert not {(Place(0), "loss"), (Place(0), "throughput")} & metrics(readings)
    assert [one.time_s for one in readings] == sorted(one.time_s for one in readings)
    assert not logs.read(ranks.now_s + 2.0) and not logs.problems()


def test_what_was_there_before_is_of_an_earlier_job(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.commit()
    logs = RankLogs(tmp_path)
    ranks.commit()
    (only,) = {one.step for one in logs.read(ranks.now_s + 1.0) if one.metric == "committed"}
    assert only == 2


def test_a_generation_that_is_over_says_nothing_more(tmp_path: Path) -> None:
    ranks, logs = Ranks(tmp_path, 2), RankLogs(tmp_path)
    ranks.commit(ranks=[0])
    ranks.generation, ranks.step = 2, 0
    ranks.commit(ranks=[1])
    ranks.generation = 1
    ranks.commit(ranks=[0])
    readings = logs.read(ranks.now_s + 1.0)
    assert [one.value for one in readings if one.metric == "generation"] == [1.0, 2.0]
    assert [one.where for one in readings if one.metric == "committed"] == [Place(0), Place(1)]


def test_a_torn_or_foreign_line_is_left_out_and_said_once(tmp_path: Path) -> None:
    ranks, logs = Ranks(tmp_path, 1), RankLogs(tmp_path)
    ranks.commit()
    path = tmp_path / "w0.jsonl"
    whole = path.read_text().splitlines()[-1]
    with open(path, "a") as stream:
        for bad in ('{"kind":"step_committed","actor":', '{"kind":"step_committed","time_ns":[]}'):
            stream.write(bad + "\n")
        stream.write(whole[:40])  # the rest comes later
    (tmp_path / f"{ORCHESTRATOR}.jsonl").write_text(whole + "\n")
    (tmp_path / "link.jsonl").symlink_to(path)
    readings = logs.read(ranks.now_s + 1.0)
    assert [one.metric for one in readings].count("committed") == 1
    assert [str(one) for one in logs.problems()] and not logs.problems()
    other = json.loads(whole)
    other["time_ns"] += int(1.5 * NS)
    line = json.dumps(other, separators=(",", ":"))
    with open(path, "a") as stream:
        stream.write("\n" + line + "\n")
    assert "committed" in {one.metric for one in logs.read(ranks.now_s + 3.0)}


def test_a_log_that_was_deleted_is_forgotten(tmp_path: Path) -> None:
    """A long job has many processes, one after the other, and room for the logs of a few."""
    ranks, logs = Ranks(tmp_path, 1), RankLogs(tmp_path)
    for _ in range(3):
        ranks.commit()
    logs.read(ranks.now_s + 1.0)
    (tmp_path / "w0.jsonl").unlink()
    logs.read(ranks.now_s + 2.0)
    ranks.now_s += 10.0
    ranks.writers[0] = ranks.writer("w0")  # shorter than what was read of the former
    ranks.commit()
    assert "committed" in {one.metric for one in logs.read(ranks.now_s + 1.0)}


def test_clocks_of_other_machines_are_brought_to_ours(tmp_path: Path) -> None:
    ranks, logs = Ranks(tmp_path, 1), RankLogs(tmp_path)
    ranks.commit()
    here_s = 5.0  # a machine that has just begun, beside one that has run for long
    assert not logs.read(here_s)
    ranks.commit()
    readings = logs.read(here_s + 1.0)
    assert {one.step for one in readings} >= {1} and all(4 < one.time_s < 6 for one in readings)


def test_of_fast_steps_a_part_is_looked_at_and_all_for_the_job(tmp_path: Path) -> None:
    ranks, logs = Ranks(tmp_path), RankLogs(tmp_path)
    for _ in range(4 * MOST_STEPS):
        ranks.commit()
    readings = logs.read(ranks.now_s + 1.0)
    of = {place: [one for one in readings if one.where == place] for place in (JOB, Place(3))}
    assert sum(one.metric == "loss" for one in of[JOB]) == 4 * MOST_STEPS
    assert sum(one.metric == "compute" for one in of[Place(3)]) == MOST_STEPS


def test_of_many_ranks_fewer_steps_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_logs, "MOST_READ", 40)
    ranks, logs = Ranks(tmp_path), RankLogs(tmp_path)
    for _ in range(40):
        ranks.commit()
    readings = logs.read(ranks.now_s + 1.0)
    for rank in range(4):
        of = [one for one in readings if one.where == Place(rank)]
        assert sum(one.metric == "compute" for one in of) == 10
    assert sum(one.metric == "loss" for one in readings) == 40


class Watched:
    """The job's service over those ranks, looked at once a second of their clock."""

    def __init__(self, events: Path, *, steps: int = 0, shards: int = 1) -> None:
        self.ranks = Ranks(events)
        self.detectors = JobDetectors(shards=shards, steps=steps)
        self.service = HealthService(
            [RankLogs(events)], [self.detectors], clock_s=lambda: self.ranks.now_s
        )
        self.alarms: list[tuple[str, int | None]] = []

    def train(self, steps: int, **how: Any) -> None:
        for _ in range(steps):
            self.ranks.commit(**how)
            self.look()

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.ranks.now_s += 1.0
            self.look()

    def look(self) -> None:
        self.service.look()
        self.alarms += [(sign.what, sign.rank) for sign in self.service.take()]  # type: ignore[union-attr]


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


@pytest.mark.slow
def test_a_slow_rank_is_named_and_no_other(watched: Watched) -> None:
    watched.train(1000)
    assert watched.alarms == []
    watched.train(160, slow=lambda rank: 2.0 if rank == 2 else 1.0)
    assert ("straggler", 2) in watched.alarms
    assert {rank for what, rank in watched.alarms if what == "straggler"} == {2}


@pytest.mark.slow
def test_a_new_generation_begins_anew(watched: Watched) -> None:
    watched.train(700)
    watched.ranks.generation = 2
    watched.train(140, slow=lambda rank: 1.2 if rank == 2 else 1.0)
    assert watched.alarms == [], "what is usual with these ranks is not known yet"


@pytest.mark.parametrize(
    ("changed", "what"),
    [({"loss": 400.0}, "loss-spike"), ({"grad_norm": 900.0}, "gradient-spike")],
)
def test_a_jump_is_an_alarm_of_the_job_once(
    watched: Watched, changed: dict[str, float], what: str
) -> None:
    watched.train(300)
    watched.train(1, **changed)
    watched.train(60)
    assert watched.alarms == [(what, None)]


def test_digests_name_the_rank_that_differs(tmp_path: Path) -> None:
    for shards, expected in ((1, [("digest-mismatch", 3)]), (2, [("digest-mismatch", None)])):
        folder = tmp_path / str(shards)
        folder.mkdir()
        one = Watched(folder, shards=shards)
        for _ in range(3):
            one.train(40)
            for rank in range(4):
                one.ranks.digest(rank, f"shard {rank % shards}")
        one.train(40)
        assert one.alarms == []
        for rank in range(4):
            one.ranks.digest(rank, "other" if rank == 3 else f"shard {rank % shards}")
        one.train(60)
        assert one.alarms == expected


def test_silence_is_an_alarm_unless_it_is_explained(watched: Watched) -> None:
    watched.train(100)
    watched.ranks.writers[0].write(Kind.BUSY, rank=0, what="evaluates", limit_s=60.0)
    watched.wait(20)
    watched.ranks.writers[0].write(Kind.BUSY_ENDED, rank=0, what="evaluates", seconds=20.0)
    watched.train(100)
    assert watched.alarms == []
    watched.wait(4)
    assert watched.alarms == []
    watched.wait(4)
    assert watched.alarms == [("hang", None)]


def test_silence_after_the_last_step_is_none(tmp_path: Path) -> None:
    watched = Watched(tmp_path, steps=100)
    watched.train(100)
    watched.wait(30)
    assert watched.alarms == []


def test_faster_steps_than_usual_have_thresholds_of_their_own(watched: Watched) -> None:
    """More decisions in an hour, each with a smaller probability to be wrong."""
    watched.train(30)
    assert watched.detectors._detectors == []
    watched.train(200)
    said = [one.step_s for one in watched.detectors._detectors]  # type: ignore[attr-defined]
    assert said == pytest.approx([0.04, 0.04, 0.02, 0.02], rel=0.1)


def test_a_read_is_few_calls_for_each_line_however_long_it_has_watched(tmp_path: Path) -> None:
    """Of 4 ranks at 25 steps a second, with two lines a step: see docs/health.md."""
    watched = Watched(tmp_path)
    watched.train(200)
    for _ in range(8):
        before, before_s = watched.ranks.step, watched.ranks.now_s
        while watched.ranks.now_s < before_s + 1.05:
            watched.ranks.commit()
        lines = 2 * 4 * (watched.ranks.step - before)
        assert calls(watched.look) < MOST_CALLS * lines


MOST_CALLS = 120
"""Of Python and C: 36 to 44 today, and 71 at the first look."""


def test_alarms_are_those_of_the_detectors(watched: Watched) -> None:
    """A detector's alarm goes through unchanged."""
    said = Alarm(what="x", where=Place(1), since_s=0.0, value=2.0, threshold=1.0)
    watched.train(230)
    watched.detectors._detectors[0].look = lambda readings, now_s: [said]  # type: ignore[method-assign]
    assert said in watched.detectors.look([], watched.ranks.now_s + HOLD_S)
