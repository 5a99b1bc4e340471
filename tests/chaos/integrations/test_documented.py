"""docs/frameworks.md shows lines of the examples, which are played for real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from trainchaos.chaos.commands.shared.options import build_catalogue
from trainchaos.chaos.loading.load import load

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "frameworks.md").read_text()
SHOWN = {
    name: code
    for section in TEXT.split("\n## ")
    for name in re.findall(r"`(examples/frameworks/\w+_train\.py)`", section)[:1]
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
}


def test_each_framework_with_an_example_shows_some_of_it() -> None:
    names = {path.name for path in (ROOT / "examples" / "frameworks").glob("*_train.py")}
    assert {Path(name).name for name in SHOWN} == names - {"spawn_train.py"}


@pytest.mark.parametrize("name", SHOWN)
def test_the_lines_shown_are_those_of_the_example(name: str) -> None:
    script = (ROOT / name).read_text().splitlines()
    assert [line for line in SHOWN[name].splitlines() if line and line not in script] == []


def test_the_scenario_shown_is_valid(tmp_path: Path) -> None:
    (code,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "train.py").touch()
    (tmp_path / "my-job.yaml").write_text(code)
    assert YAML(typ="safe").load(code)["workload"]["points"] is True
    load(tmp_path / "my-job.yaml", build_catalogue())
