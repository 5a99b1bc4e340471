"""``chaos --version`` says which commit runs, and never that of somebody else's repository."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from trainchaos.chaos import version
from trainchaos.chaos.cli import invoke


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A checkout with one commit."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    (tmp_path / "file").write_text("1")
    for words in (("init", "-q"), ("add", "file"), (*who, "commit", "-qm", "one")):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True, timeout=120)
    return tmp_path


def test_a_checkout_has_a_commit_and_a_change_shows(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(version, "HOME", repository)
    commit = version.commit_of(repository)
    assert len(commit) == 40
    assert invoke(["--version"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(f" (commit {commit[:12]})")
    (repository / "file").write_text("2")
    assert version.version_text().endswith(f" (commit {commit[:12]}+)")


def test_a_folder_in_the_checkout_of_something_else_has_none(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation in a virtual environment inside a user's repository is not of that commit."""
    inside = repository / "site-packages"
    inside.mkdir()
    assert version.commit_of(inside) == ""
    monkeypatch.setattr(version, "HOME", inside)
    monkeypatch.setattr(version, "installed_commit", lambda: "")
    assert "commit" not in version.version_text()
    monkeypatch.setattr(version, "installed_commit", lambda: "0123456789abcdef")
    assert version.version_text().endswith(" (commit 0123456789ab)")
