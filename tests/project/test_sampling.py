"""Which members of a family ``make test`` plays: those of its sample, whatever else is selected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8")
FAMILY = """
import pytest

@pytest.mark.sample(2)
@pytest.mark.parametrize("n", [pytest.param(0, marks=pytest.mark.long), 1, 2, 3, 4])
def test_one(n):
    pass

def test_other():
    pass
"""


@pytest.mark.parametrize(
    ("options", "played"),
    [
        (("-m", "not long"), ["test_one[1]", "test_one[2]", "test_other"]),
        (("-m", "long"), ["test_one[0]", "test_one[3]", "test_one[4]"]),
    ],
)
def test_the_first_of_a_family_are_its_sample(
    tmp_path: Path, options: tuple[str, ...], played: list[str]
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (tmp_path / "test_family.py").write_text(FAMILY, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  long: l\n  sample(n): s\n")
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, str(tmp_path)]
    ran = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    found = [line.partition("::")[2] for line in ran.stdout.splitlines() if "::" in line]
    assert found == played, ran.stdout + ran.stderr
