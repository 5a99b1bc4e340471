"""Ctrl-C while ``python -m trainchaos.recovery.run`` still imports."""

from __future__ import annotations

import subprocess
import sys

import pytest

INTERRUPTED_IMPORT = """
import importlib.abc, os, runpy, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "trainchaos.recovery.cli.options":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
runpy.run_module("trainchaos.recovery.run", run_name="__main__", alter_sys=True)
"""


HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""A shell has it ignored by what it starts in the background, these tests for example."""


@pytest.mark.slow
def test_it_ends_with_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEARD + INTERRUPTED_IMPORT, "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "recovery: interrupted\n")


@pytest.mark.slow
def test_it_stays_ignored_where_a_shell_has_it_ignored() -> None:
    done = subprocess.run(
        [
            "sh",
            "-c",
            'trap "" INT; exec "$@"',
            "sh",
            sys.executable,
            "-c",
            INTERRUPTED_IMPORT,
            "-h",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0 and "usage:" in done.stdout
