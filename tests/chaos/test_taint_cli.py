"""``chaos taint``: what it prints and refuses, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from trainchaos.chaos.cli import cli, invoke
from trainchaos.recovery.health.taints import TaintList


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "taints.yaml"
    monkeypatch.setenv("CHAOS_TAINTS", str(found))
    return found


def test_list_add_and_clear(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["taint", "list"]) == 0
    assert "no place is tainted" in capsys.readouterr().out
    more = ["--evidence", "xid=79", "--evidence", "unit=degC", "--expires", "2099-01-01T00:00:00Z"]
    assert invoke(["taint", "add", "host-a/cuda:3", "--reason", "fell off", *more]) == 0
    assert "tainted host-a/cuda:3 until 2099-01-01T00:00:00Z: fell off" in capsys.readouterr().out
    (found,) = TaintList(path).read()
    assert found.evidence == {"xid": 79, "unit": "degC"} and found.by == "person"
    assert invoke(["taint", "add", "host-a/cuda:3", "--reason", "fell off", *more]) == 0
    assert "tainted already" in capsys.readouterr().out
    old = path.read_text() + (
        "- node: host-b\n  reason: warm\n  since: 2020-01-01T00:00:00Z\n"
        "  expiry: 2020-01-02T00:00:00Z\n  by: alarm\n"
    )
    path.write_text(old)
    assert invoke(["taint", "list"]) == 0
    said = capsys.readouterr().out
    assert "xid=79, unit=degC" in said and "expired 2020-01-02T00:00:00Z" in said
    assert invoke(["taint", "list", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["taints"]
    assert [row["expired"] for row in rows] == [False, True]
    assert invoke(["taint", "clear", "host-b", "host-a/cuda:3"]) == 0
    assert "cleared host-b: warm" in capsys.readouterr().out
    assert TaintList(path).read() == ()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["add", "host a", "--reason", "x"], "'host a' is no place"),
        (["add", "host-a/gpu:1", "--reason", "x"], "is no place"),
        (["add", "h", "--reason", "x", "--expires", "2020-01-01T00:00:00Z"], "is not after"),
        (["add", "h", "--reason", "x", "--expires", "soon"], "'soon' is no time"),
        (["add", "h", "--reason", "x", "--expires", "2099-01-01"], "has no time zone"),
        (["add", "h", "--reason", ""], "reason"),
        (["add", "h", "--reason", "x", "--evidence", "a=1", "--evidence", "a=2"], "each once"),
        (["clear", "h"], "not tainted"),
    ],
)
def test_mistakes_are_usage_errors(
    path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert invoke(["taint", *words]) == 2
    assert said in capsys.readouterr().err
    assert not path.exists()


def test_a_malformed_list_is_an_error_with_its_line(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text("version: 1\ntaints:\n- node: a\n")
    for words in (["list"], ["add", "h", "--reason", "x"], ["clear", "a"]):
        assert invoke(["taint", *words]) == 2
        assert f"{path}:3: taint 1: reason" in capsys.readouterr().err
    assert path.read_text() == "version: 1\ntaints:\n- node: a\n"


def test_clear_completes_the_places_of_the_list(path: Path) -> None:
    for place in ("host-a", "host-b/cuda:1", "other"):
        assert invoke(["taint", "add", place, "--reason", "x"]) == 0
    shell = ShellComplete(cli, {}, "chaos", "_CHAOS_COMPLETE")
    found = shell.get_completions(["taint", "clear"], "host")
    assert [item.value for item in found] == ["host-a", "host-b/cuda:1"]
    path.write_text("broken: [")
    assert shell.get_completions(["taint", "clear"], "host") == []
    assert isinstance(cli, click.Group)
