"""Runs a command line as a process whose exit code stays right even if nothing reads its output."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.say import say

ANSWER_BY_CODE = frozenset(
    {"run", "analyze", "report", "gate", "compare", "heal", "agent", "init", "project"}
)
"""Commands that write files or answer by exit code: they succeed even if their output is lost."""


def run_as_process(invoke: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command line, protected from output that cannot be written (``| head``, a closed
    terminal); returns its exit code.

    A command whose only result is its output fails if the output was lost. SIGINT is enabled even
    if a shell without job control, which ignores SIGINT for background commands, started it: the
    signal ends a run at any time, not only once the run has begun.
    """
    from trainchaos.recovery.process.output import lost_output, shield

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    shield()
    code, lost = invoke(argv), lost_output()
    if lost is None:
        return code
    say(f"cannot write the output: {lost}", err=True)
    return (
        errors.EXIT_HARNESS if code == errors.EXIT_PASS and not ANSWER_BY_CODE & set(argv) else code
    )
