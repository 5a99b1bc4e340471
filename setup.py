"""Stores the commit of a checkout in what is built from it; all else is in ``pyproject.toml``.

It runs where nothing of ours can be imported yet.
"""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
COMMIT = runpy.run_path(str(ROOT / "trainchaos" / "chaos" / "commit.py"))


def store(top: str) -> None:
    """Write the commit below ``top``, unless this is no checkout: then it is there already."""
    path = Path(top, "trainchaos", "chaos", COMMIT["FILE"])
    if (commit := COMMIT["commit_of"](ROOT)) and path.parent.is_dir():
        path.write_text(commit + "\n")


class BuildWithCommit(build_py):
    """A wheel's files."""

    def run(self) -> None:
        """As always, and the commit; an editable installation is the checkout itself."""
        super().run()
        if not self.editable_mode:
            store(self.build_lib)


class SourceWithCommit(sdist):
    """A source distribution, from which a wheel may be built without the checkout."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """As always, and the commit."""
        super().make_release_tree(base_dir, files)
        store(base_dir)


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SourceWithCommit})
