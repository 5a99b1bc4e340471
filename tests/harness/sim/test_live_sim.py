"""Live spares in simulated runs: what a promotion copies, and what a spare in trouble costs."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.events.log import Event, Kind, read_log

KILL = "{{id: kill{0}, kind: process-kill, target: {{rank: {1}}}, at: {{step: {0}, phase: {2}}}}}"
SPARE = "{{id: spare, kind: {}, target: {{role: spare, select: one}}, at: {{step: 8}}}}"


def play(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *faults: str,
    recovery: str = "{strategy: hot-spare, sync: live}",
    parallelism: str = "ddp",
) -> tuple[int, list[Event]]:
    """The exit code, and the events of the faulted arm."""
    monkeypatch.chdir(tmp_path)
    text = [
        "version: 1",
        "name: live",
        "seed: 4",
        "workload: {kind: mlp, ranks: 4, steps: 40, global_batch: 16, checkpoint: {every: 10},"
        f" parallelism: {parallelism}}}",
        f"recovery: {recovery}",
        f"faults: [{', '.join(faults)}]",
        'stop_conditions: [{when: "no_committed_step_for > 60s"}]',
    ]
    path = tmp_path / "live.yaml"
    path.write_text("\n".join(text) + "\n")
    code = invoke(["run", str(path), "--launcher", "sim"])
    found = sorted(tmp_path.glob("runs/live/*/events/*faulted"))
    return code, list(read_log(found[-1]).events) if found else []


def origins(events: list[Event]) -> list[tuple[str, int]]:
    """Of each state that was given to a member of a later generation."""
    return [
        (str(event.data["origin"]), int(event.data.get("bytes", -1)))
        for event in events
        if event.kind is Kind.STATE_READY
        and event.generation > 1
        and event.data["origin"] != "kept"
    ]


def test_nothing_is_copied_in_incidents_in_a_row_whoever_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = [
        KILL.format(8, 2, "backward"),
        KILL.format(18, 3, "forward"),
        KILL.format(30, 0, "data"),
    ]
    code, events = play(tmp_path, monkeypatch, *kills)
    assert (code, origins(events)) == (0, [("live", 0)] * 3)
    assert {str(e.data["how"]) for e in events if e.kind is Kind.SPARE_SYNCED} == {"equal", "copy"}


def test_by_default_the_state_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kill = KILL.format(8, 2, "backward")
    code, events = play(tmp_path, monkeypatch, kill, recovery="hot-spare")
    assert (code, origins(events)) == (0, [("peer", -1)])
    assert not [event for event in events if event.kind is Kind.SPARE_SYNCED]


def test_a_stopped_spare_is_dropped_and_the_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, events = play(tmp_path, monkeypatch, SPARE.format("process-stop"))
    dropped = [event for event in events if event.kind is Kind.SPARE_DROPPED]
    assert code == 0 and "lags by more than 4 steps" in str(dropped[0].data["why"])
    assert not [event for event in events if event.kind is Kind.GENERATION_STARTED][1:]


def test_a_killed_spare_is_replaced_and_the_next_one_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = KILL.format(30, 2, "backward")
    code, events = play(tmp_path, monkeypatch, SPARE.format("process-kill"), kill)
    assert (code, origins(events)) == (0, [("live", 0)])


def test_a_value_that_went_wrong_is_answered_by_a_whole_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan = (
        "{id: nan, kind: tensor-corrupt, params: {surface: gradient, op: nan}, target: {rank: 1},"
        " at: {step: 20}}"
    )
    code, events = play(tmp_path, monkeypatch, nan)
    assert (code, origins(events)) == (0, [("peer", -1)])


def test_a_model_that_is_spread_over_ranks_is_an_error_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _ = play(tmp_path, monkeypatch, parallelism="fsdp")
    assert code == 2
    assert "live.yaml:5" in (said := "".join(capsys.readouterr())) and "sync: none" in said
