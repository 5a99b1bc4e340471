"""What a shell completes: asked of bash itself, as its user would."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
CHAOS = Path(sys.executable).with_name("chaos")


def completed(*words: str, at: Path = ROOT) -> list[str]:
    """The values that bash offers for the last word."""
    script = f"""
eval "$({shlex.quote(str(CHAOS))} completion bash)"
COMP_WORDS=({shlex.join(words)})
COMP_CWORD={len(words) - 1}
registered=$(complete -p {words[0]})
registered=${{registered#*-F }}
${{registered%% *}} {shlex.quote(str(CHAOS.with_name(words[0])))}
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", script], cwd=at, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("anal",), {"analyze"}),
        (("run", "builtin:kill"), {"builtin:kill-one-rank"}),
        (("run", "scenarios/kill-one-rank.yaml", "--launcher", "do"), {"docker"}),
        (("run", "builtin:kill-one-rank", "--cell", "recovery=hot"), {"recovery=hot-spare"}),
        (("list", "st"), {"strategies"}),
        (("stacks", "install", "torchf"), {"torchft"}),
        (("compare", "x.yaml", "--stacks", "torchrun,torchf"), {"torchrun,torchft"}),
        (("copy", "builtin:examples/torchrun_b"), {"builtin:examples/torchrun_beacon"}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
@pytest.mark.skipif(not CHAOS.exists() or shutil.which("bash") is None, reason="needs both")
def test_bash_completes(words: tuple[str, ...], offered: set[str]) -> None:
    assert set(completed("chaos", *words)) == offered


@pytest.mark.long
@pytest.mark.skipif(not CHAOS.exists() or shutil.which("bash") is None, reason="needs both")
def test_bash_completes_for_the_other_name_too() -> None:
    assert completed("trainchaos", "anal") == ["analyze"]


def test_runs_are_completed_newest_first(tmp_path: Path) -> None:
    for name in ("2026-01-01", "2026-01-02"):
        (tmp_path / "runs" / "kill" / name).mkdir(parents=True)
    found = completed("chaos", "analyze", "ru", at=tmp_path)
    assert found == ["runs/kill/2026-01-02", "runs/kill/2026-01-01"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert "_CHAOS_COMPLETE" in said
    registers = {
        "zsh": "compdef _{0}_completion {0}\n",
        "fish": "complete --no-files --command {0} ",
    }
    assert all(registers[shell].format(name) in said for name in ("chaos", "trainchaos"))
