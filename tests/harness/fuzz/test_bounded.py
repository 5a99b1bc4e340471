"""An arm of a search ends: by its processor time, and not because others have the processors."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from trainchaos.harness.fuzz.play import play
from trainchaos.harness.fuzz.play.play import BLOCKED_TIMES, ArmTimeout, bounded

LIMIT_S = 0.1


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """What handled the signals before does so afterwards, and no timer runs."""
    before = [signal.getsignal(signum) for signum in (signal.SIGPROF, signal.SIGALRM)]
    yield
    assert [signal.getsignal(signum) for signum in (signal.SIGPROF, signal.SIGALRM)] == before
    for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
        assert signal.getitimer(timer) == (0.0, 0.0)


def compute() -> None:
    while True:
        pass


def wait_for_nothing() -> None:
    threading.Event().wait(100 * BLOCKED_TIMES * LIMIT_S)


@pytest.mark.parametrize(
    ("what", "says"), [(compute, "s of a processor"), (wait_for_nothing, "within 1 s")]
)
def test_what_does_not_end_is_ended(
    what: Callable[[], None], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what is compute:  # whoever gets no processor has longer
        monkeypatch.setattr(play, "BLOCKED_TIMES", 1000)
    with pytest.raises(ArmTimeout, match=says) as raised, bounded(LIMIT_S, "faulted"):
        what()
    assert what.__name__ in str(raised.value)


def test_limits_that_are_reached_together_raise_once() -> None:
    with pytest.raises(ArmTimeout, match="of a processor"), bounded(1000.0, "faulted"):
        try:
            signal.raise_signal(signal.SIGPROF)
        finally:
            signal.raise_signal(signal.SIGALRM)


def test_whoever_gets_no_processor_has_longer() -> None:
    with bounded(10 * LIMIT_S, "faulted"):
        threading.Event().wait(15 * LIMIT_S)
