"""Runs a ``chaos`` command in a process of its own that has little memory."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import traceback
from pathlib import Path

from trainchaos.chaos.cli import invoke

MORE_BYTES = 512 << 20
"""Memory beyond what this process takes, which has imported what the command needs."""
PROCESSOR_S = 120
LONGEST_S = 240
"""They only end what never ends, also on a busy machine."""
TRACEBACK = 90


def limited(said: Path, argv: list[str]) -> tuple[int, float, str]:
    """Exit code (``TRACEBACK``: an exception got out), processor seconds, and output, which goes to
    the file ``said``.
    """
    child = os.fork()
    if child == 0:
        code = TRACEBACK
        try:
            sys.stdout = sys.stderr = said.open("w", errors="replace")
            gc.freeze()
            has = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (has + MORE_BYTES,) * 2)
            resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR_S,) * 2)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(LONGEST_S)
            code = invoke(argv)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    text = said.read_text(errors="replace")
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, text
