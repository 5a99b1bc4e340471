"""What comes with the program, by name: run, listed, copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainchaos.chaos.cli import build_catalogue, invoke
from trainchaos.chaos.errors import ScenarioError
from trainchaos.chaos.loading import builtin
from trainchaos.chaos.loading.load import load


def test_a_scenario_is_found_by_its_path_and_by_its_last_part() -> None:
    whole = builtin.find("builtin:kill-one-rank")
    assert whole.name == "kill-one-rank.yaml"
    assert builtin.find("builtin:parallel/hsdp-kill") == builtin.find("hsdp-kill")


def test_every_name_loads_and_no_regression_is_among_them() -> None:
    assert len(builtin.scenarios()) > 50
    assert not any("regressions" in name for name in builtin.scenarios())
    load(builtin.find("targets/kill-two-ranks"), build_catalogue(), env={})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("kill-one-ranck", "did you mean builtin:kill-one-rank?"),
        ("../../../etc/passwd", "nothing built in is called"),
        ("", "nothing built in is called"),
    ],
)
def test_another_name_is_refused(name: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["validate", f"builtin:{name}"]) == 2
    assert said in capsys.readouterr().err


def test_what_may_be_copied_is_named_for_an_unknown_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert invoke(["copy", "builtin:torchrun", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert builtin.others() and all(f"builtin:{name}" in said for name in builtin.others())
    assert "chaos list scenarios shows all scenarios" in said
    assert invoke(["validate", "builtin:torchrun"]) == 2, "which takes scenarios alone"
    assert "builtin:examples/" not in capsys.readouterr().err


def test_a_copy_has_what_it_extends_and_replaces_nothing(tmp_path: Path) -> None:
    made = builtin.copy("builtin:targets/kill-two-ranks", tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in made} == {
        "targets/kill-two-ranks.yaml",
        "kill-one-rank.yaml",
    }
    assert load(made[0], build_catalogue(), env={}).cells
    made[0].write_text("mine")
    made[1].unlink()
    with pytest.raises(ScenarioError, match="there already"):
        builtin.copy("builtin:targets/kill-two-ranks", tmp_path)
    assert made[0].read_text() == "mine" and not made[1].exists(), "all or nothing"
    builtin.copy("builtin:targets/kill-two-ranks", tmp_path, force=True)
    assert made[0].read_text() != "mine"


def test_a_link_in_the_way_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / "kill-one-rank.yaml").symlink_to(other)
    with pytest.raises(ScenarioError, match="there already"):
        builtin.copy("kill-one-rank", tmp_path)
    builtin.copy("kill-one-rank", tmp_path, force=True)
    assert other.read_text() == "precious"


def test_examples_and_templates_are_copied_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["copy", "builtin:examples/torchrun_ddp", str(tmp_path)]) == 0
    assert (tmp_path / "torchrun_ddp" / "train.py").is_file()
    assert invoke(["copy", "builtin:templates/trainchaos.gitlab-ci.yml", str(tmp_path)]) == 0
    assert (
        invoke(["copy", "builtin:kill-one-rank", str(tmp_path / "torchrun_ddp" / "train.py")]) == 2
    )
    assert "cannot be written" in capsys.readouterr().err
