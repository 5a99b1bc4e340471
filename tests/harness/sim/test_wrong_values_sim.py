"""A process that is replaced for its values is not replaced on the same device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands.unreported import no_reports
from trainchaos.chaos import cli
from trainchaos.chaos.events.log import Kind, read_log
from trainchaos.chaos.home import HOME
from trainchaos.harness.host.rundir import open_run
from trainchaos.harness.judge.verdict.judge import judge

__all__ = ["no_reports"]

STORED = HOME / "scenarios" / "health" / "wrong-values-elsewhere.yaml"


@pytest.mark.parametrize("drop", ["false", "true"])
@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.usefixtures("no_reports")
def test_a_replacement_for_wrong_values_starts_elsewhere(tmp_path: Path, drop: str) -> None:
    text = STORED.read_text(encoding="utf-8")
    assert "drop: false" in text
    (tmp_path / "moved.yaml").write_text(text.replace("drop: false", f"drop: {drop}"))
    asked = ["run", str(tmp_path / "moved.yaml"), "--launcher", "sim", "--quiet"]
    assert cli.invoke([*asked, "--runs", str(tmp_path / "runs")]) == 0
    run = open_run(tmp_path / "runs" / "wrong-values-elsewhere" / "latest")
    arms = [arm.id for arm in judge(run).arms if arm.arm == "faulted"]
    assert arms
    for arm in arms:
        log = read_log(run.events(arm))
        on = {e.data["process"]: e.data["device"] for e in log.of(Kind.PROCESS_SPAWNED)}
        assert [on[f"w{rank}"] for rank in range(4)] == [f"cpu:{rank}" for rank in range(4)]
        blamed = [e.data["process"] for e in log.of(Kind.FAILURE_DETECTED)]
        assert blamed == ["w0"] * 3
        assert set(on) == {"w0", "w1", "w2", "w3", "w4"}
        assert on["w4"] != on["w0"], "it gave wrong values there"
