"""What a run says of other processes on its machine."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.running import PYTHON
from trainchaos.chaos.planning.load import OthersLoad, busy_words, family_s


class Machine:
    """Two processors, of which a test says what they did."""

    def __init__(self, folder: Path) -> None:
        self.stat, self.now_s, self.own_s = folder / "stat", 0.0, 0.0
        self.passes(0.0, 0, 0.0)

    def passes(self, seconds: float, ticks: int, own_s: float) -> None:
        """Time in which the processors were busy for so many ticks of 10 ms, ``own_s`` with us."""
        self.now_s += seconds
        self.own_s += own_s
        self.stat.write_text(f"cpu  {ticks} 0 0 999 50 0 0 0 0 0\ncpu0 1 2 3\n")

    def load(self) -> OthersLoad:
        """Measured from now on."""
        return OthersLoad(self.stat, own_s=lambda: self.own_s, now_s=lambda: self.now_s)


@pytest.mark.parametrize(
    ("seconds", "ticks", "own_s", "share"),
    [
        (1.0, 100, 1.0, 0.0),
        (1.0, 200, 1.0, 0.5),
        (1.0, 90, 1.0, 0.0),
        (1.0, 900, 0.0, 1.0),
        (0.05, 10, 0.0, None),
    ],
)
def test_the_share_of_others_is_what_we_did_not_use(
    tmp_path: Path, seconds: float, ticks: int, own_s: float, share: float | None
) -> None:
    machine = Machine(tmp_path)
    load = machine.load()
    machine.passes(seconds, ticks, own_s)
    assert load.share(2) == (pytest.approx(share) if share is not None else None)


@pytest.mark.parametrize("text", ["", "cpu", "cpu a b c", "nonsense"])
def test_what_cannot_be_read_is_not_known(tmp_path: Path, text: str) -> None:
    machine = Machine(tmp_path)
    load = machine.load()
    machine.passes(1.0, 0, 0.0)
    machine.stat.write_text(text)
    assert load.share(2) is None
    machine.stat.unlink()
    assert load.share(2) is None and machine.load().share(2) is None


@pytest.mark.parametrize(
    ("launcher", "share", "said"),
    [
        ("local", 0.9, True),
        ("agents", 0.25, True),
        ("local", 0.2, False),
        ("local", None, False),
        ("sim", 0.9, False),
        ("slurm", 0.9, False),
    ],
)
def test_a_run_beside_others_says_so(launcher: str, share: float | None, said: bool) -> None:
    scenario: Any = SimpleNamespace(launcher=SimpleNamespace(kind=launcher))
    assert ("other programs used" in busy_words([scenario], share, 2)) == said


def test_the_counters_of_this_machine_are_understood() -> None:
    share = OthersLoad(now_s=iter((0.0, 1.0)).__next__).share(1)
    assert share is not None and 0.0 <= share <= 1.0


BURN = """\
import time
while time.process_time() < 0.4: sum(range(10000))
print(flush=True)
input()
"""


@pytest.mark.slow
def test_the_time_of_descendants_is_ours_while_they_live_and_when_they_are_gone() -> None:
    began_s = family_s()
    shell = ["sh", "-c", f"{PYTHON} -c '{BURN}'; true"]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None and one.stdout.readline() == "\n"
        alive_s = family_s()
        assert alive_s - began_s >= 0.35
        one.communicate("\n", timeout=120)
    assert family_s() >= alive_s - 0.03  # the kernel's ticks against its exact times


def test_a_family_that_the_kernel_does_not_show_is_this_process(tmp_path: Path) -> None:
    assert 0.0 < family_s(tmp_path) <= family_s() + 0.03
