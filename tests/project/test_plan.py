"""What continuous integration plays whole and in part: ``.ci/plan.py``."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

PLAN = Path(__file__).parents[2] / ".ci" / "plan.py"


def planned(**environment: str) -> dict[str, str]:
    """The lines that it prints."""
    ran = subprocess.run(
        [sys.executable, str(PLAN)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split("=", 1) for line in ran.stdout.splitlines())


def test_without_a_release_point_everything_is_whole() -> None:
    plan = planned(SINCE="never")
    assert plan["share"] == "1/1" and "docker" in plan["whole_groups"]


def test_the_same_share_is_played_again_and_nothing_changed_since_head() -> None:
    found = planned(SINCE="HEAD", SHARE="3/36")
    assert found["share"] == "3/36"
    assert planned(SINCE="HEAD")["share"].endswith("/36")


@pytest.mark.parametrize(
    ("path", "groups", "tests"),
    [
        ("recovery/policy/strategies/adaptive.py", [], ["tests/recovery/policy/"]),
        ("recovery/nodes/link/protocol.py", ["docker", "slurm"], ["tests/recovery/nodes/"]),
        ("harness/compare/stacks/torchrun.py", ["stacks"], ["tests/harness/compare/"]),
        ("tests/harness/fuzz/test_search.py", ["search"], ["tests/harness/fuzz/test_search.py"]),
        ("chaos/cli.py", [], ["tests/chaos/test_"]),
        ("docs/recovery.md", [], []),
    ],
)
def test_a_path_brings_its_group_and_its_tests(
    path: str, groups: list[str], tests: list[str]
) -> None:
    plan = runpy.run_path(str(PLAN))
    assert plan["groups_of"]([path]) == groups
    assert plan["tests_of"]([path]) == tests


def test_every_path_of_the_plan_is_there() -> None:
    root = PLAN.parents[1]
    below = [path for paths in runpy.run_path(str(PLAN))["GROUPS"].values() for path in paths]
    assert [path for path in below if not (root / path).exists()] == []
