"""What pip installs: one name at the top, beside a user's own recovery, harness and reports; with
scenarios, examples and templates.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.decided import but_for_noise

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 240.0
WHO = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.com")
SCRIPT = """
import harness, recovery, reports
from trainchaos import beacon
from trainchaos import recovery as ours

print(recovery.WHOSE, harness.WHOSE, reports.WHOSE)
job = ours.join(samples=8, steps=3, global_batch=2)
import torch
model = torch.nn.Linear(2, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
while job.running():
    with job.step() as step:
        step.backward(model(torch.ones(len(step.samples), 2)).sum())
        step.commit()
"""

pytestmark = [pytest.mark.long, pytest.mark.real]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the wheel of a clone installs."""
    place = tmp_path_factory.mktemp("wheel")
    clone = place / "clone"
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        there, here = clone / name, ROOT / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if here.is_symlink():
            there.symlink_to(os.readlink(here))
        elif here.is_file():
            there.write_bytes(here.read_bytes())
    for command in (("init", "-q"), ("add", "--all"), (*WHO, "commit", "-q", "-m", "all of it")):
        subprocess.run(["git", "-C", str(clone), *command], timeout=LIMIT_S, check=True)
    words = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(clone)]
    subprocess.run([sys.executable, *words], timeout=LIMIT_S, check=True)
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place / "site")
    return place / "site"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's project with packages of the same names."""
    for name in ("recovery", "harness", "reports", "chaos"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"WHOSE = 'my {name}'\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def python(installed: Path, at: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python there, with the installation before any checkout."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=at,
        env={**os.environ, "PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(at / "cache")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_it_has_one_name_at_the_top(installed: Path) -> None:
    top = sorted(path.name for path in installed.iterdir() if path.suffix != ".dist-info")
    assert top == ["trainchaos"]
    inside = {path.name for path in (installed / "trainchaos").iterdir()}
    rooms = {"chaos", "recovery", "harness", "reports"}
    files = {"scenarios", "examples", "templates", "constraints.txt"}
    assert inside == rooms | files | {"__init__.py", "__main__.py"}
    assert not list(installed.rglob("__pycache__"))


def test_a_users_packages_of_the_same_names_are_theirs(installed: Path, project: Path) -> None:
    words = ("-m", "trainchaos.recovery.run", "--ranks", "2", "--strategy", "hot-spare", "train.py")
    done = python(installed, project, *words)
    assert done.returncode == 0, done.stderr
    assert "my recovery my harness my reports" in done.stdout + done.stderr


def test_scenarios_run_by_name(installed: Path, project: Path) -> None:
    fewer = ("--cell", "recovery=hot-spare", "--repeat", "1", "-q")
    words = ("-m", "trainchaos", "run", "builtin:kill-one-rank", *fewer)
    done = python(installed, project, *words)
    assert but_for_noise(done.returncode, project / "runs") == 0, done.stdout + done.stderr
    page = project / "runs" / "kill-one-rank" / "latest" / "report.html"
    assert page.read_text().startswith("<!DOCTYPE html>")


def test_the_rest_is_there(installed: Path, project: Path) -> None:
    for words in (
        ("copy", "builtin:examples/torchrun_ddp"),
        ("copy", "builtin:templates/trainchaos.gitlab-ci.yml"),
        ("list", "scenarios"),
        ("--version",),
        ("stacks", "list"),
        ("explain", "xid", "79"),
        ("plan", "--k8s", "builtin:kill-one-rank"),
        ("plan", "--sbatch", "builtin:kill-one-rank"),
    ):
        done = python(installed, project, "-m", "trainchaos", *words)
        assert done.returncode == 0, done.stderr
    assert (project / "torchrun_ddp" / "train.py").is_file()


def test_it_knows_the_commit_that_it_was_built_from(installed: Path, project: Path) -> None:
    clone = installed.with_name("clone")
    asked = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    commit = subprocess.run(
        asked, capture_output=True, text=True, timeout=LIMIT_S, check=True
    ).stdout
    done = python(installed, project, "-m", "trainchaos", "--version")
    assert done.stdout.endswith(f"(commit {commit[:12]})\n"), done.stdout + done.stderr


def test_pins_are_found_before_anything_else_is_installed(installed: Path, project: Path) -> None:
    """As templates/trainchaos.gitlab-ci.yml does: -S, so that no other package is there."""
    done = python(installed, project, "-S", "-m", "trainchaos.chaos.home")
    assert "torch==" in (Path(done.stdout.strip()) / "constraints.txt").read_text(), done.stderr


def test_a_command_line_without_what_it_needs_says_so(installed: Path, project: Path) -> None:
    """As in the environment of a framework, where scripts use the beacon only."""
    done = python(installed, project, "-S", "-m", "trainchaos", "--help")
    assert done.returncode == 1 and "chaos needs click, which is not installed" in done.stderr


def test_another_environment_imports_it_and_nothing_beside_it(
    installed: Path, project: Path
) -> None:
    """Its Python must not find the torch of ours."""
    (installed / "beside_it.py").write_text("")
    code = (
        "from trainchaos.chaos.home import import_root; import os, sys;"
        "root = import_root(); again = import_root(); assert root == again;"
        "print(sorted(os.listdir(root)), (root / 'trainchaos' / 'harness').is_dir())"
    )
    done = python(installed, project, "-c", code)
    (installed / "beside_it.py").unlink()
    assert done.stdout == "['trainchaos'] True\n", done.stderr
