"""Live spares in simulated runs: what a promotion copies, and what a spare in trouble costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.loading.test_scenarios import catalogue
from tests.support.arms import judged
from tests.support.search.simulate import control_of, evidence
from tests.support.search.simulate import play as simulate
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.log import Event, Kind
from trainchaos.chaos.loading.load import load
from trainchaos.chaos.loading.overrides import of_option

KILL = "{{id: kill{0}, kind: process-kill, target: {{rank: {1}}}, at: {{step: {0}, phase: {2}}}}}"
SPARE = "{{id: spare, kind: {}, target: {{role: spare, select: one}}, at: {{step: 8}}}}"

HSDP = "{hsdp: {replicas: 2, shards: 2}}"
PARTS = "{strategy: hot-spare, sync: live, spares: 2}"


def text_of(recovery: str, parallelism: str, *faults: str, ranks: int = 4) -> str:
    """A scenario."""
    text = [
        "version: 1",
        "name: live",
        "seed: 4",
        f"workload: {{kind: mlp, ranks: {ranks}, steps: 40, global_batch: 16,"
        f" checkpoint: {{every: 10}}, parallelism: {parallelism}}}",
        f"recovery: {recovery}",
        f"faults: [{', '.join(faults)}]",
        'stop_conditions: [{when: "no_committed_step_for > 60s"}]',
    ]
    return "\n".join(text) + "\n"


def play(
    memory: Path,
    *faults: str,
    recovery: str = "{strategy: hot-spare, sync: live}",
    parallelism: str = "ddp",
    ranks: int = 4,
) -> list[Event]:
    """The events of the faulted arm, which completes, with every checker content."""
    path = memory / "live.yaml"
    path.write_text(text_of(recovery, parallelism, *faults, ranks=ranks))
    overrides = [of_option("--launcher", "launcher", "sim")]
    (cell,) = load(path, catalogue(), overrides=overrides, env={}).cells
    faulted = simulate(cell, memory, seed=4)
    found = judged(evidence(faulted, control_of(cell, seed=4)))
    assert {name: f.witness for name, f in found.items() if f.verdict != "pass"} == {}
    assert faulted.outcome == "completed"
    return list(faulted.log.events)


def origins(events: list[Event]) -> list[tuple[str, int]]:
    """Of each state that was given to a member of a later generation."""
    return [
        (str(event.data["origin"]), int(event.data.get("bytes", -1)))
        for event in events
        if event.kind is Kind.STATE_READY
        and event.generation > 1
        and event.data["origin"] != "kept"
    ]


def test_nothing_is_copied_in_incidents_in_a_row_whoever_is_lost(memory: Path) -> None:
    kills = [
        KILL.format(8, 2, "backward"),
        KILL.format(18, 3, "forward"),
        KILL.format(30, 0, "data"),
    ]
    events = play(memory, *kills)
    assert origins(events) == [("live", 0)] * 3
    assert {str(e.data["how"]) for e in events if e.kind is Kind.SPARE_SYNCED} == {"equal", "copy"}


def test_by_default_the_state_is_copied(memory: Path) -> None:
    kill = KILL.format(8, 2, "backward")
    events = play(memory, kill, recovery="hot-spare")
    assert origins(events) == [("peer", -1)]
    assert not [event for event in events if event.kind is Kind.SPARE_SYNCED]


def test_a_stopped_spare_is_dropped_and_the_job_goes_on(memory: Path) -> None:
    events = play(memory, SPARE.format("process-stop"))
    dropped = [event for event in events if event.kind is Kind.SPARE_DROPPED]
    assert "lags by more than 4 steps" in str(dropped[0].data["why"])
    assert not [event for event in events if event.kind is Kind.GENERATION_STARTED][1:]


def test_a_killed_spare_is_replaced_and_the_next_one_follows(memory: Path) -> None:
    kill = KILL.format(30, 2, "backward")
    events = play(memory, SPARE.format("process-kill"), kill)
    assert origins(events) == [("live", 0)]


def test_a_value_that_went_wrong_is_answered_by_a_whole_copy(memory: Path) -> None:
    nan = (
        "{id: nan, kind: tensor-corrupt, params: {surface: gradient, op: nan}, target: {rank: 1},"
        " at: {step: 20}}"
    )
    events = play(memory, nan)
    assert origins(events) == [("peer", -1)]


@pytest.mark.parametrize(
    ("ranks", "lost", "recovery", "parallelism"),
    [
        (1, [0], "{strategy: hot-spare, sync: live}", "ddp"),
        (2, [0, 1], "{strategy: hot-spare, sync: live, spares: 2}", "ddp"),
        (4, [0, 2], PARTS, HSDP),
    ],
)
def test_where_no_rank_is_left_that_holds_the_state_its_spares_bring_it(
    memory: Path, ranks: int, lost: list[int], recovery: str, parallelism: str
) -> None:
    kills = [KILL.format(17, rank, "backward").replace("kill17", f"k{rank}") for rank in lost]
    events = play(memory, *kills, recovery=recovery, parallelism=parallelism, ranks=ranks)
    began = [event for event in events if event.kind is Kind.GENERATION_READY]
    states = [event.data["state"] for event in events if event.kind is Kind.GENERATION_STARTED]
    assert states[1] == "spare" and "checkpoint" not in states
    assert began[1].data["resume_step"] == 16, "and not the checkpoint of step 10"


@pytest.mark.parametrize("parallelism", ["fsdp", HSDP])
def test_a_model_whose_parts_spares_cannot_follow_is_an_error_at_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parallelism: str
) -> None:
    path = tmp_path / "live.yaml"
    path.write_text(text_of("{strategy: hot-spare, sync: live}", parallelism))
    assert invoke(["run", str(path), "--launcher", "sim", "--runs", str(tmp_path / "runs")]) == 2
    assert "live.yaml:5" in (said := "".join(capsys.readouterr())) and "sync: none" in said


def placed(events: list[Event]) -> list[int]:
    """The part that each spare was told to follow, in order."""
    return [int(event.data["shard"]) for event in events if event.kind is Kind.SPARE_PLACED]


def test_of_a_model_in_parts_each_part_has_a_spare_and_nothing_is_copied(memory: Path) -> None:
    kills = [
        KILL.format(8, 2, "backward"),
        KILL.format(18, 3, "forward"),
        KILL.format(30, 1, "data"),
    ]
    events = play(memory, *kills, recovery=PARTS, parallelism=HSDP)
    assert origins(events) == [("live", 0)] * 3
    assert placed(events) == [0, 1, 0, 1, 1], "who replaces a spare follows what it followed"
    how = [str(e.data["how"]) for e in events if e.kind is Kind.SPARE_SYNCED]
    assert how[:2] == ["equal"] * 2 and set(how[2:]) == {"copy"}


def test_without_sync_live_no_spare_has_a_part_before_it_has_a_rank(memory: Path) -> None:
    kill, recovery = KILL.format(8, 2, "backward"), "{strategy: hot-spare, spares: 2}"
    events = play(memory, kill, recovery=recovery, parallelism=HSDP)
    assert (origins(events), placed(events)) == ([("peer", -1)], [])


def test_both_ranks_of_a_replica_are_lost_at_once_and_both_spares_take_their_places(
    memory: Path,
) -> None:
    kill = (
        "{id: both, kind: process-kill, target: {select: {count: 2}, exclude: {ranks: [0, 1]}},"
        " at: {step: 20, phase: backward}}"
    )
    events = play(memory, kill, recovery=PARTS, parallelism=HSDP)
    assert origins(events) == [("live", 0)] * 2


def test_a_part_whose_spare_is_gone_is_followed_again_before_the_next_loss(memory: Path) -> None:
    kill = KILL.format(30, 2, "backward")
    spare = SPARE.format("process-kill")
    events = play(memory, spare, kill, recovery=PARTS, parallelism=HSDP)
    assert origins(events) == [("live", 0)]
    assert placed(events)[2] in (0, 1) and sorted(placed(events)[:2]) == [0, 1]


def test_a_coordinator_that_takes_over_knows_who_follows_what(memory: Path) -> None:
    lost = "{id: lost, kind: coordinator-kill, params: {down_s: 0.1}, at: {step: 10}}"
    kills = [KILL.format(20, 2, "backward"), KILL.format(30, 1, "forward")]
    events = play(memory, lost, *kills, recovery=PARTS, parallelism=HSDP)
    assert origins(events) == [("live", 0)] * 2
    assert [event for event in events if event.kind is Kind.COORDINATOR_ADOPTED]
