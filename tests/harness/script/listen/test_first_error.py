"""The first error of a job, below which its launcher printed more."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.harness.script.listen.errors import telling_error
from trainchaos.harness.script.outcome_text import printed

SYNTAX = [
    '  File "bad.py", line 2',
    "    def main(:",
    "             ^",
    "SyntaxError: invalid syntax",
]
RAISED = [
    "Traceback (most recent call last):",
    '  File "a.py", line 5, in <module>',
    "    load(path)",
    '  File "a.py", line 4, in load',
    "    return open(path)",
    "           ^^^^^^^^^^",
    "FileNotFoundError: [Errno 2] No such file or directory: '/no/such'",
]
FOOTER = [
    "Traceback (most recent call last):",
    '  File "bin/torchrun", line 8, in <module>',
    "    sys.exit(main())",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "============================================================",
    "Root Cause (first observed failure):",
    "[0]:",
    "  time      : 2026-11-25_19:27:35",
    "  rank      : 0 (local_rank: 0)",
    "  exitcode  : 1 (pid: 29554)",
    "  traceback : To enable traceback see: errors.html",
    "============================================================",
]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["W1125 Setting OMP_NUM_THREADS", *SYNTAX, *FOOTER], SYNTAX),
        (["starting", *RAISED, *SYNTAX, *FOOTER], RAISED[-4:]),
        ([f"[rank0]: {line}" for line in RAISED] + FOOTER, [f"[rank0]: {r}" for r in RAISED[-4:]]),
        (["ValueError: only said", *RAISED], RAISED[-4:]),
        (FOOTER, []),
        (["KeyError"], []),
        ([], []),
    ],
)
def test_the_first_error_is_found(lines: list[str], error: list[str]) -> None:
    assert telling_error(lines)[0] == error


def test_an_error_that_each_restart_meets_is_shown_before_the_echo_of_a_kill() -> None:
    gloo = [*RAISED[:3], "RuntimeError: [../gloo/pair.cc:525] Connection closed by peer [::1]:2301"]
    lines = [*gloo, *FOOTER]
    for pid in range(3):
        missing = f"FileNotFoundError: [Errno 2] No such file: 'out/{pid}/trainer_state.json'"
        lines += [*RAISED[:-1], missing, *FOOTER]
    error, times = telling_error(lines)
    assert error[-1] == "FileNotFoundError: [Errno 2] No such file: 'out/0/trainer_state.json'"
    assert times == 3
    assert "its error, 3 times:" in printed(FOOTER, error, times)


def test_an_error_that_the_last_lines_show_is_not_shown_twice() -> None:
    assert "first error" not in printed(RAISED[-6:], RAISED[-4:])
    said = printed(FOOTER[-6:], SYNTAX)
    assert said.index("its first error:") < said.index("SyntaxError") < said.index("its last lines")


FAILING = """
import sys
try:
    compile("def main(:", "train.py", "exec")
except SyntaxError:
    import traceback
    traceback.print_exc()
for n in range(20):
    print("footer of the launcher", n, file=sys.stderr)
sys.exit(1)
"""
SCENARIO = """
version: 1
name: failing
workload:
  command: [python, failing.py]
  ranks: 1
  steps: 20
  progress: {regex: 'step (?P<step>[0-9]+)'}
faults: [{id: k, kind: process-kill, target: {rank: 0}, at: {step: 5}}]
"""


@pytest.mark.real
def test_a_run_and_a_watch_show_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("failing.py").write_text(FAILING)
    Path("failing.yaml").write_text(SCENARIO)
    assert invoke(["run", "failing.yaml", "-q"]) == 3
    run = capsys.readouterr()
    assert invoke(["init", "--", sys.executable, "failing.py"]) == 2
    for said in (run.out + run.err, capsys.readouterr().err):
        assert "| SyntaxError: invalid syntax" in said and "| footer of the launcher 19" in said
