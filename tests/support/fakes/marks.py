"""Progress marks, as a supervisor reads them."""

from __future__ import annotations

from trainchaos.recovery.transport.progress_counters import Mark


def mark(
    phase: str,
    *,
    moves: int = 0,
    step: int = 10,
    collective: int = 1,
    committed: int | None = None,
    busy_s: int = 0,
) -> Mark:
    """A rank's mark; ``moves`` distinguishes it from the next; ``committed``: by default all before
    ``step``.
    """
    return Mark(
        generation=1,
        step=step,
        phase=phase,
        collective=collective,
        time_ns=moves,
        committed=step - 1 if committed is None else committed,
        last_seq=0,
        busy_s=busy_s,
    )
