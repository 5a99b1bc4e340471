"""What continuous integration plays besides ``make test`` and smokes: whole, the groups of tests
whose paths differ from the last release point; of all others a share, another with another commit.

Prints lines for ``eval`` in a shell. ``SHARE`` (as 3/36) and ``SINCE`` (a commit, or ``never``) in
the environment play a given choice again.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARES = 36
NODES = ("recovery/nodes/", "harness/launch/nodes/", "recovery/transport/")
GROUPS = {
    "docker": ("harness/launch/containers/", "harness/launchers/docker.py", *NODES),
    "slurm": ("harness/launch/slurm/", "harness/launchers/slurm.py", *NODES),
    "stacks": ("harness/compare/", "harness/peers/"),
    "frameworks": ("chaos/integrations/", "chaos/beacon.py", "examples/frameworks/"),
    "search": ("harness/fuzz/", "harness/sim/", "harness/judge/"),
}
"""Groups that ``make test`` has no member of, and what they test besides their own tests."""


def changed(since: str) -> list[str] | None:
    """Paths that differ from a commit; None: no such commit, so all may differ."""
    argv = ["git", "-C", str(ROOT), "diff", "--name-only", since, "--"]
    ran = subprocess.run(argv, capture_output=True, text=True)
    return ran.stdout.split("\n") if ran.returncode == 0 else None


def groups_of(paths: Sequence[str]) -> list[str]:
    """The groups that these paths touch."""
    return [
        name
        for name, below in GROUPS.items()
        if any(path.removeprefix("tests/").startswith(below) for path in paths)
    ]


def tests_of(paths: Sequence[str]) -> list[str]:
    """Folders of tests that mirror a changed folder, and changed files of tests."""
    found = set[str]()
    for path in paths:
        room, _, rest = path.partition("/")
        if path.startswith("tests/") and Path(path).name.startswith("test_"):
            found.add(path)
        elif room in ("chaos", "recovery", "harness", "reports", "benchmarks"):
            folder = Path("tests", room, rest).parent
            while not (ROOT / folder).is_dir():
                folder = folder.parent
            # a room's own folder holds all of its packages: of it the tests beside them
            found.add(f"{folder}/" if folder.parts[2:] else f"{folder}/test_")
    return sorted(found)


def main() -> None:
    """Print the plan."""
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    file = Path(__file__).with_name("release-point")
    point = file.read_text().split()[0] if file.exists() else "never"
    since = os.environ.get("SINCE") or point
    share = os.environ.get("SHARE") or f"{int(head or '0', 16) % SHARES + 1}/{SHARES}"
    paths = changed(since)
    plan = {
        "share": "1/1" if paths is None else share,
        "since": since,
        "whole_groups": " ".join(GROUPS if paths is None else groups_of(paths)),
        "whole_tests": "" if paths is None else " ".join(tests_of(paths)),
    }
    for name, value in plan.items():
        print(f"{name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
