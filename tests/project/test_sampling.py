"""What is played of families of tests, and of parts: ``tests/conftest.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CONFTEST = (Path(__file__).parents[1] / "conftest.py").read_text(encoding="utf-8")
FAMILY = """
import pytest

@pytest.mark.parametrize("n", [pytest.param(0, marks=pytest.mark.long), *range(1, 31)])
def test_one(n):
    pass

@pytest.mark.sample(7)
@pytest.mark.parametrize("n", range(30))
def test_more(n):
    pass

@pytest.mark.smoke
def test_smoke():
    pass

@pytest.mark.real
def test_real():
    pass
"""
MARKS = "[pytest]\naddopts = -m 'not long'\nmarkers =\n  long\n  sample\n  smoke\n  real\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "a").mkdir()
    (folder / "a" / "test_family.py").write_text(FAMILY, encoding="utf-8")
    (folder / "pytest.ini").write_text(MARKS)
    return folder


SCRIPT = """
import json, sys
import pytest

class Names:
    def pytest_collection_finish(self, session):
        names[:] = [item.name for item in session.items]

found = []
for options in json.loads(sys.argv[1]):
    names = []
    code = pytest.main(["--collect-only", "-qq", *options], plugins=[Names()])
    found.append([code, names])
print(chr(10) + json.dumps(found))
"""


SEEDS = tuple(("--sample", seed) for seed in ("1", "1", "2"))
LONG_TOO = ("-m", "long or not long")
PARTS = tuple(("--part", f"{n}/3") for n in (1, 2, 3))
WHOLE = ("--part", "2/3", "--whole", "b a/test_family.py")
Played = dict[tuple[str, ...], list[list[str]]]


@pytest.fixture(scope="module")
def played(folder: Path) -> Played:
    """Options -> names of the tests that are played with them, in order, each time: all in one
    process, of which the start takes longest.
    """
    options = [*SEEDS, (), LONG_TOO, *PARTS, WHOLE]
    argv = [sys.executable, "-c", SCRIPT, json.dumps(options)]
    ran = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {code for code, _ in found} <= {0, 5}, ran.stdout + ran.stderr
    made: Played = {}
    for one, (_, names) in zip(options, found, strict=True):
        made.setdefault(one, []).append(names)
    return made


def count(names: list[str]) -> dict[str, int]:
    return {name: sum(one.startswith(f"test_{name}") for one in names) for name in ("one", "more")}


def test_a_seed_draws_few_of_each_family_and_the_same_again(played: Played) -> None:
    (first, again), (other,) = played[SEEDS[0]], played[SEEDS[2]]
    assert first == again != other
    assert count(first) == count(other) == {"one": 3, "more": 7}
    assert {"test_smoke", "test_real"} <= set(first) and "test_one[0]" not in first


def test_without_a_seed_all_that_is_not_long_is_played(played: Played) -> None:
    (names,), (both,) = played[()], played[LONG_TOO]
    assert names[0] == "test_real", "real processes come first"
    assert count(names) == {"one": 30, "more": 30}
    assert count(both) == {"one": 31, "more": 30}


def test_parts_are_disjoint_and_make_the_whole_but_for_smokes(played: Played) -> None:
    parts = [played[part][0] for part in PARTS]
    rest = [set(names) - {"test_smoke"} for names in parts]
    assert all("test_smoke" in names for names in parts)
    assert sum(map(len, rest)) == len(set.union(*rest)) == 61
    assert played[WHOLE] == played[()]
