"""A name server that does not answer is noticed before anybody is blamed for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace

import pytest

from tests.support.running import LIMIT_S
from trainchaos.harness.host import dns_check
from trainchaos.harness.run.doctor import _names


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The second look-up is not answered while the test goes on."""
    over, asked = threading.Event(), [0]

    def look(*_: object) -> tuple[str, str]:
        asked[0] += 1
        if asked[0] == 2:
            over.wait(LIMIT_S)
            raise socket.gaierror("no answer")
        return dns_check.ADDRESS, "0"

    monkeypatch.setattr(dns_check.socket, "getnameinfo", look)
    yield asked
    over.set()


def test_one_look_up_that_is_not_answered_is_enough(silent: list[int]) -> None:
    assert dns_check.slowest_lookup_s(limit_s=1.0) > 0.0
    assert silent == [2], "the one under way counts"


def test_answers_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_check.socket, "getnameinfo", lambda *_: (dns_check.ADDRESS, "0"))
    clock_s = count(100.0, 0.25)
    monkeypatch.setattr(dns_check, "time", SimpleNamespace(monotonic=lambda: next(clock_s)))
    assert dns_check.slowest_lookup_s(limit_s=LIMIT_S) == 0.25


@pytest.mark.parametrize(
    ("slowest_s", "said"), [(0.001, False), (dns_check.SLOW_S, False), (5.01, True)]
)
def test_slow_names_are_worth_a_caution(slowest_s: float, said: bool) -> None:
    caution = dns_check.caution(slowest_s)
    assert bool(caution) == said
    assert not said or ("took 5 s" in caution and "/etc/hosts" in caution)


@pytest.mark.parametrize(("slowest_s", "state"), [(0.001, "ready"), (5.0, "missing")])
def test_doctor_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, slowest_s: float, state: str
) -> None:
    monkeypatch.setattr(dns_check, "slowest_lookup_s", lambda: slowest_s)
    found = _names()
    assert found.state == state and bool(found.todo) == (state != "ready")
