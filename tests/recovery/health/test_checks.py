"""Checks of places, of this machine and of nodes: what comes of each, and that nobody waits."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from tests.support.running import until
from trainchaos.harness.preflight import one
from trainchaos.harness.preflight.check import Finding, Findings
from trainchaos.recovery.health.checks import LIMIT_S, MOST_LOOK_S, Answer, PlaceChecks
from trainchaos.recovery.nodes.coordinator.node_state import (
    NodeChecked,
    NodeGone,
    NodeJoined,
    NodeLost,
)
from trainchaos.recovery.nodes.coordinator.place_checks import SLACK_S, NodeChecks
from trainchaos.recovery.process.processes import state

SPOT, OTHER = (0, "cuda:1@n0"), (0, "cuda:0")
WAITS = "import signal; signal.pause()"


class Bench:
    """Checks whose program is a line of Python, on a clock of the test's."""

    def __init__(self, *command: str) -> None:
        self.now_s = 100.0
        self.found: list[Answer] = []
        self.checks = PlaceChecks(command, now_s=lambda: self.now_s)

    def look(self) -> None:
        self.found += self.checks.take()

    def looks(self, seconds: float) -> None:
        """As the supervisor does for so long."""
        for _ in range(round(seconds / MOST_LOOK_S)):
            self.now_s += MOST_LOOK_S
            self.look()

    def check(self) -> int:
        """Have a place checked; returns the pid of the program."""
        self.checks.begin(SPOT)
        self.look()
        (pid,) = self.checks.pids
        return pid

    def wait(self) -> None:
        """Until the programs that run have ended."""
        for pid in self.checks.pids:
            fd = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            assert poll.poll(120_000), "it did not end"
            os.close(fd)
        self.look()


@pytest.fixture
def bench() -> Iterator[Callable[[str], Bench]]:
    made: list[Bench] = []

    def make(program: str) -> Bench:
        made.append(Bench(sys.executable, "-c", program))
        return made[-1]

    yield make
    for each in made:
        each.checks.close()


def says(fit: bool | None, said: str = "") -> str:
    return f"import sys; print({json.dumps({'fit': fit, 'said': [said]})!r}); print(sys.argv[1])"


@pytest.mark.parametrize(
    ("program", "fit", "said"),
    [
        (says(True), True, ""),
        (says(False, "one word differs"), False, "one word differs"),
        (says(None, "no device"), None, "no device"),
        ("import sys; sys.exit(3)", None, "its check ended with 3"),
        ("print('{')", None, "its check ended with 0"),
        ("print('[1]')", None, "its check ended with 0"),
    ],
)
def test_what_a_program_says_is_the_answer(
    bench: Callable[[str], Bench], program: str, fit: bool | None, said: str
) -> None:
    here = bench(program)
    here.check()
    here.wait()
    assert here.found == [Answer(SPOT, fit, said)]


def test_a_program_that_is_not_there_is_said() -> None:
    here = Bench("/nowhere/to/be/found")
    here.checks.begin(SPOT)
    here.look()
    assert here.found[0].fit is None and "cannot be checked" in here.found[0].said


def test_a_check_that_does_not_answer_is_ended_and_its_place_unfit(
    bench: Callable[[str], Bench],
) -> None:
    here = bench(WAITS)
    pid = here.check()
    here.looks(LIMIT_S)
    assert here.checks.pids == (pid,)
    here.looks(2)
    assert [one.fit for one in here.found] == [False] and "no answer" in here.found[0].said
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_time_in_which_nobody_looks_is_not_the_places(bench: Callable[[str], Bench]) -> None:
    """The machine of supervisor, check and device stood still, such as a paused node."""
    here = bench(WAITS)
    here.check()
    here.now_s += 10 * LIMIT_S
    here.look()
    assert len(here.checks.pids) == 1 and not here.found


def test_a_place_whose_check_was_stopped_is_not_unfit(bench: Callable[[str], Bench]) -> None:
    here = bench("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    pid = here.check()
    until(lambda: state(pid) == "T")
    here.looks(LIMIT_S + 2)
    assert [one.fit for one in here.found] == [None] and "was stopped" in here.found[0].said


def test_an_answer_that_was_there_in_time_counts_though_nobody_looked(
    bench: Callable[[str], Bench],
) -> None:
    here = bench(says(True))
    here.check()
    here.looks(LIMIT_S - 1)
    here.now_s += 2 * LIMIT_S
    here.wait()
    assert [one.fit for one in here.found] == [True]


def test_one_at_a_time_and_none_is_left_behind(bench: Callable[[str], Bench]) -> None:
    here = bench(WAITS)
    here.checks.begin(OTHER)
    pid = here.check()
    here.checks.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not here.checks.take()


# ---- of nodes


class Asked:
    """The checks of two nodes, on a clock of the test's."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.asked: list[tuple[int, str]] = []
        self.lost: set[int] = set()
        self.checks = NodeChecks(self._ask, now_s=lambda: self.now_s)

    def _ask(self, node: int, device: str) -> None:
        if node in self.lost:
            raise NodeGone(node, "the power failed")
        self.asked.append((node, device))

    def answers(self) -> list[tuple[Any, ...]]:
        return [(*one.spot, one.fit) for one in self.checks.take()]


def test_agents_are_asked_by_the_names_of_their_own_devices() -> None:
    nodes = Asked()
    nodes.checks.begin((0, "cuda:0@n0"))
    nodes.checks.begin((1, "cuda:0@n1"))
    assert nodes.asked == [(0, "cuda:0"), (1, "cuda:0")] and not nodes.answers()
    nodes.checks.hear(NodeChecked(node=1, device="cuda:0", fit=False, said="a word differs"))
    assert nodes.answers() == [(1, "cuda:0@n1", False)], "node 0 has not answered"
    nodes.checks.hear(NodeChecked(node=1, device="cuda:0", fit=True, said=""))
    nodes.checks.hear(NodeChecked(node=0, device="cuda:3", fit=True, said=""))
    assert not nodes.answers(), "nobody asked that"


def test_a_node_that_goes_knows_nothing_of_its_places() -> None:
    nodes = Asked()
    nodes.checks.begin((0, "cpu"))
    nodes.checks.begin((1, "cpu"))
    nodes.checks.hear(NodeLost(node=0, why="the power failed"))
    assert nodes.answers() == [(0, "cpu", None)]
    nodes.lost.add(0)
    nodes.checks.begin((0, "cpu"))
    assert nodes.answers() == [(0, "cpu", None)]


def test_that_an_agent_joined_is_heard_after_it_was_asked_by_one_that_takes_over() -> None:
    nodes = Asked()
    nodes.checks.begin((0, "cpu"))
    nodes.checks.hear(NodeJoined(node=0, info=cast(Any, None)))
    assert not nodes.answers(), "it is the agent that was asked"
    nodes.checks.hear(NodeChecked(node=0, device="cpu", fit=False, said="a word differs"))
    assert nodes.answers() == [(0, "cpu", False)]


def test_an_agent_that_does_not_answer_is_not_waited_for_without_bound() -> None:
    nodes = Asked()
    nodes.checks.begin((0, "cuda:0"))
    nodes.checks.begin((0, "cuda:1"))
    nodes.now_s += LIMIT_S + 1
    assert not nodes.answers(), "its agent ends it at the limit, and has to say so"
    nodes.now_s += SLACK_S
    assert nodes.answers() == [(0, "cuda:0", None)]
    nodes.now_s += LIMIT_S
    assert nodes.answers() == [(0, "cuda:1", None)], "one after the other"


# ---- the program


def found(state: Any, said: str) -> Findings:
    return Findings(findings=[Finding(check="memory", place="cpu:0", state=state, said=said)])


@pytest.mark.parametrize(
    ("state", "fit", "status"), [("fit", True, 0), ("unfit", False, 1), ("unmeasured", None, 7)]
)
def test_the_program_says_what_was_measured(
    capsys: pytest.CaptureFixture[str], state: str, fit: bool | None, status: int
) -> None:
    asked = []

    def measure(place: str, *, total_s: float) -> Findings:
        asked.append((place, total_s))
        return found(state, "64 MiB")

    assert one.main(["--seconds", "5", "cpu"], measure=measure) == status
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"fit": fit, "said": [] if fit else ["64 MiB"]} and asked == [("cpu:0", 5.0)]


def test_a_place_that_there_cannot_be_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        one.main(["gpu"])
    assert ended.value.code == 2 and "'gpu' is no place" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.real
def test_a_place_of_this_machine_is_fit() -> None:
    import subprocess

    command = [sys.executable, "-m", "trainchaos.harness.preflight.one", "--parent"]
    done = subprocess.run(
        [*command, str(os.getpid()), "cpu"], capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0 and json.loads(done.stdout) == {"fit": True, "said": []}
