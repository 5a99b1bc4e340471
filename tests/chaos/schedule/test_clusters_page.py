"""What docs/clusters.md shows is true: parameters are read, files and options are there, privileges
are as it says.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from trainchaos.chaos import cli, plugins
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.scenario.model import LauncherSpec
from trainchaos.chaos.schedule.blast import privilege
from trainchaos.harness.launch.launcher import Launcher

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "clusters.md").read_text()
LAUNCHERS = plugins.load(plugins.LAUNCHERS, Launcher)
BLOCKS = re.findall(r"```yaml\n(launcher:.*?)```", PAGE, re.S)


def test_there_is_a_recipe_for_each() -> None:
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=["docker", "slurm", "remote"])
def test_parameters_are_read(block: str) -> None:
    spec = LauncherSpec.model_validate(YAML(typ="safe", pure=True).load(block)["launcher"])
    LAUNCHERS[spec.kind](**spec.params)


def test_commands_name_files_and_options_that_are_there() -> None:
    commands = re.findall(r"^\.venv/bin/chaos (.*)$", PAGE, re.M)
    assert len(commands) >= 5
    for command in commands:
        words = command.split(">")[0].split()
        shown = CliRunner().invoke(cli.cli, [words[0], "--help"])
        assert shown.exit_code == 0, command
        assert all(word in shown.output for word in words[1:] if word.startswith("--")), command
        assert all((ROOT / word).exists() for word in words if word.endswith(".yaml")), command


@pytest.mark.parametrize(
    ("row", "needs"),
    [
        ("links between ranks", {Need.LINKS}),
        ("a limit on memory or processor time", {Need.MEMORY, Need.QUOTA}),
        ("a limited file system", {Need.MOUNT}),
        ("processes, nodes as a whole", {Need.NODES}),
    ],
)
def test_privileges_are_as_the_table_says(row: str, needs: set[Need]) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    said = dict(
        zip(
            ("local", "docker", "slurm"),
            (cell.strip() for cell in line.split("|")[3:6]),
            strict=True,
        )
    )
    words = {"none": "none", "net_admin": "NET_ADMIN", "root": "root"}
    for name, text in said.items():
        launcher = LAUNCHERS[name]
        if not needs <= launcher.offers:
            assert text == "not offered", name
        else:
            assert words[privilege(needs, launcher.costs)] in text, name
