"""What the ranks of a real run printed, as one text for tools that read training output: each line
with its rank before it, and nothing of the injection.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log
from trainchaos.harness.explain.strip import BETRAYING, NEUTRAL_MESSAGE

FILE = "output.txt"
MOST_BYTES = 4 << 20  # of one process
_OURS = ("harness/rank/shims", "harness/rank/fault_agent", "chaos/faults", "chaos/beacon")
"""Files of the injection, as a traceback names them."""


def output_of(logs: Path, log: Log) -> str:
    """The output below ``logs``, of all processes that held a rank, one process after the other:
    their lines have no times. Lines that betray an injection are replaced, so that line numbers
    stay. ``log``: of the arm. An output that cannot be read is left out.
    """
    ranks: dict[str, int] = {}
    for event in log.of(Kind.GENERATION_STARTED):
        ranks.update({str(name): rank for rank, name in enumerate(event.data["members"])})
    return "".join(
        f"[rank{rank}]: {line}\n" for name, rank in ranks.items() for line in _lines(logs, name)
    )


def _lines(logs: Path, name: str) -> Iterator[str]:
    try:
        with open(logs / f"{name}.log", "rb") as stream:
            text = stream.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        betrays = any(word in line.lower() for word in BETRAYING)
        yield NEUTRAL_MESSAGE if betrays or any(part in line for part in _OURS) else line
