"""A command line as a process: its exit code says what happened, even if its output has no
reader.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from chaos import errors
from chaos.commands._say import say

ANSWER_BY_CODE = frozenset({"run", "analyze", "report", "gate", "compare", "heal", "agent"})
"""Commands that leave files, or whose exit code is the answer: they work without a reader of their
output.
"""


def run_as_process(invoke: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command line with output that cannot break it (``| head``, a terminal that is gone);
    its exit code.

    Where the output is all there is to a command, it has failed if that could not be written. A
    SIGINT ends it, also where a shell without job control started it in the background, which has
    it ignored: a run ends by it whenever it comes, not only once it has begun.
    """
    from recovery.process.output import lost_output, shield

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
