"""Files of an exam: papers without answers, keys, and answers that are no answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from trainchaos.chaos.commands.attribute import attribute
from trainchaos.chaos.errors import NewerVersion
from trainchaos.harness.attribute.paper import PaperError, begin, key_path, read_key
from trainchaos.harness.explain.diagnosis import DiagnosisError, read_diagnosis
from trainchaos.harness.fuzz.play.play import kinds

GOOD: dict[str, Any] = {
    "at_s": 1.5,
    "cause": "hang",
    "rank": 2,
    "layer": "application",
    "action": "restart",
}


def invoke(*arguments: str) -> str:
    """Output of ``chaos attribute``. Raises what it raises."""
    result = CliRunner().invoke(attribute, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    assert result.return_value == 0
    return result.output


def written(path: Path, tree: object) -> Path:
    """A file with that JSON."""
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"cause": "gremlins"}, r"runs\.q0001\[1\]\.cause: .*not 'gremlins'"),
        ({"rank": -1}, r"runs\.q0001\[1\]\.rank: .*not -1"),
        ({"layer": None}, r"runs\.q0001\[1\]\.layer"),
        ({"node": 1}, r"runs\.q0001\[1\]: .*a rank or a node, not both"),
        ({"at_s": float("inf")}, r"runs\.q0001\[1\]\.at_s"),
        ({"who": "me"}, r"runs\.q0001\[1\]\.who"),
    ],
)
def test_a_wrong_entry_is_named(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    runs = {"q0001": [GOOD, {**GOOD, **change}]}
    path = written(tmp_path / "a.json", {"version": 1, "tool": "x", "runs": runs})
    with pytest.raises(DiagnosisError, match=named) as caught:
        read_diagnosis(path)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{\n"version": 1,\n,', r"a\.json:3: no JSON"),
        ("[]", "the document"),
        ('{"version": 1, "tool": "", "runs": {}}', "tool"),
        ("\ufeff\x00", "no JSON"),
    ],
)
def test_what_is_no_diagnosis_is_refused(text: str, named: str, tmp_path: Path) -> None:
    with pytest.raises(DiagnosisError, match=named):
        read_diagnosis(written(tmp_path / "a.json", text))


def test_a_newer_version_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NewerVersion):
        read_diagnosis(written(tmp_path / "a.json", {"version": 2, "answers": []}))
    with pytest.raises(DiagnosisError, match="cannot be read"):
        read_diagnosis(tmp_path / "none.json")


@pytest.mark.slow
def test_a_paper_has_no_answers_and_is_scored_with_its_key(tmp_path: Path) -> None:
    paper, into = tmp_path / "paper", tmp_path / "into"
    asked = "process-kill,gpu-oom,exception"
    said = invoke(
        *("--kinds", asked, "--strategy", "hot-spare", "--unfaulted", "1", "-q"),
        *("--export", str(paper), "--into", str(into)),
    )
    assert "cause        3 of 3" in said
    manifest = (paper / "manifest.json").read_text()
    everything = manifest + "".join(path.read_text() for path in sorted(paper.rglob("*.jsonl")))
    assert len(json.loads(manifest)["questions"]) == 4
    assert not [kind for kind in kinds() if f'"{kind}"' in everything]
    assert "inject" not in everything
    assert not list(paper.rglob("*key*"))
    assert len(read_key(paper).questions) == 4
    answers = str(into / "diagnoses.json")
    again = invoke(
        *("--score", str(paper), "--diagnoses", answers, "--into", str(tmp_path / "again"))
    )
    assert "cause        3 of 3" in again
    first = json.loads((into / "results.json").read_text())
    second = json.loads((tmp_path / "again" / "results.json").read_text())
    assert first["overall"] == second["overall"]
    assert first["incidents"][0]["post_mortem"]["timeline"]
    assert first["incidents"][0]["post_mortem"]["recommended_action"]
    assert "post_mortem" not in second["incidents"][0]  # the key has no logs


def test_a_paper_that_is_there_and_a_key_that_is_not_are_refused(tmp_path: Path) -> None:
    (tmp_path / "paper").mkdir()
    with pytest.raises(PaperError, match="cannot be made"):
        begin(tmp_path / "paper")
    with pytest.raises(PaperError, match=r"paper\.key\.json: cannot be read"):
        read_key(tmp_path / "paper")
    written(key_path(tmp_path / "paper"), {"version": 1, "questions": 3})
    with pytest.raises(PaperError, match="is no key of an exam") as caught:
        read_key(tmp_path / "paper")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "arguments", [("--score", "x"), ("--diagnoses", "x"), ("--kinds", "nonsense")]
)
def test_wrong_usage_is_refused(arguments: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"go together|unknown kind 'nonsense'") as caught:
        invoke(*arguments, "--into", str(tmp_path))
    assert getattr(caught.value, "exit_code", None) == 2
