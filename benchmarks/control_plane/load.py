"""The real coordinator under the load of simulated node agents, driven by Locust:
``python -m benchmarks.control_plane.load --agents 2048 --case rack``, or ``--all``.

Needs the extra ``load``. Each case starts a coordinator, as ``recovery.run --nodes`` does, and a
Locust process without its page, whose users are the agents (``locustfile``); keeps both reports of
Locust, the coordinator's log and ``results.json`` in a directory of its own below ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.control_plane.cases import (
    BEGIN,
    CASE_VARIABLE,
    CASES,
    END,
    Case,
    ProcessSample,
    goals,
    results,
    rows,
)
from benchmarks.harness import ROOT, commit_of, machine, options, placed
from trainchaos.chaos.errors import (
    EXIT_FAIL,
    EXIT_PASS,
    ChaosError,
    InfrastructureError,
    MissingCapability,
    ScenarioError,
)

ALL = (
    *((name, 2048) for name in ("rack", "steady", "tenth", "restart", "cuts", "slow", "lying")),
    *((name, agents) for agents in (512, 8192) for name in ("steady", "rack")),
)
"""Cases and agents of ``--all``: what the goals are about first."""
LOOK_S = 0.5
HOST = "127.0.0.1"
LISTENS_LIMIT_S = END_LIMIT_S = 60.0
SPARE_FILES = 256
"""Descriptors beside one for each agent: logs, libraries, the handshakes under way."""
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")


class Watched:
    """A process of a case. Its output goes to a file; ``samples``: what it has used."""

    def __init__(
        self, words: Sequence[str], output: Path, *, passed: int | None = None, **env: str
    ) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.output, self.samples = output, list[ProcessSample]()
        with output.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env},
                pass_fds=() if passed is None else (passed,),
            )

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def sample(self) -> None:
        """Note its processor time and memory, as long as it runs."""
        with suppress(OSError):
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            cpu_s, rss = (int(fields[11]) + int(fields[12])) / TICKS, int(fields[21]) * PAGE
            self.samples.append(ProcessSample(at_s=time.monotonic(), cpu_s=cpu_s, rss=rss))

    def close(self) -> None:
        """Kill it and wait for its end."""
        self._process.kill()
        self._process.wait(END_LIMIT_S)

    def said(self) -> str:
        """The end of what it wrote."""
        return self.output.read_text(errors="replace")[-2000:]


def play(case: Case, asked: int, *, most_s: float) -> dict[str, Any]:
    """Play a case in its folder; returns its results, which are written there as well. ``asked``:
    the end of the pipe on which Locust asks for a restart; ``most_s``: for all of it. Raises
    InfrastructureError.
    """
    begun_s, file = time.monotonic(), case.write()
    coordinator = _coordinator(case)
    locust: Watched | None = None
    try:
        _await_listening(coordinator)
        coordinator.sample()
        words = ["locust", "-f", str(Path(__file__).with_name("locustfile.py")), "--headless"]
        words += ["--only-summary", "--html", str(case.file("locust.html")), "--stop-timeout", "1"]
        words += ["--json-file", str(case.file("locust"))]
        about = {CASE_VARIABLE: str(file)}
        locust = Watched(words, case.file("locust.txt"), passed=case.asks, **about)
        while not locust.ended:
            if time.monotonic() > begun_s + most_s:
                raise InfrastructureError(
                    f"{case.name} with {case.agents} agents took longer than {most_s:.0f} s",
                    hint="use fewer --agents, or a machine that nobody else uses",
                )
            ready, _, _ = select.select([asked], [], [], LOOK_S)
            coordinator.sample()
            locust.sample()
            if ready and os.read(asked, 64):
                coordinator.close()
                before, coordinator = coordinator.samples, _coordinator(case, "--adopt")
                coordinator.samples = before
            elif coordinator.ended:
                said = coordinator.said()
                raise InfrastructureError(f"the coordinator ended: {said}", hint="see its output")
    finally:
        for process in (locust, coordinator):
            if process is not None:
                process.close()
    try:
        found = json.loads(case.file("found.json").read_text())
    except (OSError, ValueError) as error:
        why = f"Locust noted nothing: {locust.said()}"
        raise InfrastructureError(why, hint=f"see {case.folder}") from error
    made = results(
        case,
        found,
        events=case.file("events"),
        coordinator=coordinator.samples,
        agents=locust.samples,
        wall_s=time.monotonic() - begun_s,
    )
    case.file("results.json").write_text(json.dumps(made, indent=1) + "\n")
    return made


def _coordinator(case: Case, *more: str) -> Watched:
    script = case.file("train.py")
    script.write_text('"""The script that the ranks would run."""\n')
    words = [
        *("benchmarks.control_plane.coordinator", str(case.file("probe"))),
        *("--ranks", str(case.agents * case.ranks), "--nodes", str(case.agents)),
        *("--listen", f"{HOST}:{case.port}", "--token-file", str(case.file("token"))),
        *("--strategy", "drop-replica", "--param", "rejoin=false", "--device", "cpu"),
        *("--verify-every", "0", "--hang-timeout", "30", "--events", str(case.file("events"))),
        *more,
    ]
    return Watched([*words, str(script)], case.file("coordinator.txt"))


def _await_listening(coordinator: Watched) -> None:
    """Until it says that it awaits its agents. Raises InfrastructureError."""
    until_s = time.monotonic() + LISTENS_LIMIT_S
    while "are to dial" not in coordinator.said():
        if coordinator.ended or time.monotonic() > until_s:
            said = coordinator.said()
            why = f"the coordinator does not listen: {said}"
            raise InfrastructureError(why, hint="see its output")
        time.sleep(0.05)


def _parser() -> argparse.ArgumentParser:
    parser = options(__doc__)
    add = parser.add_argument
    add("--agents", type=int, default=64, help="node agents (default 64)")
    add("--ranks", type=int, default=8, help="ranks of each (default 8)")
    add("--case", choices=CASES, default="steady", help="what happens (default steady)")
    add("--ramp", type=float, help="agents started a second (default: all in 10 s, 20 at least)")
    add("--rack", type=int, default=32, help="agents in a rack (default 32, half of all at most)")
    add("--beat", type=float, default=1.0, help="seconds between heartbeats (default 1)")
    add("--steady", type=float, default=15.0, help="seconds measured before the act (default 15)")
    add("--hold", type=float, default=5.0, help="seconds measured after it (default 5)")
    add("--limit", type=float, default=120.0, help="seconds for each wait (default 120)")
    add("--out", type=Path, default=Path("runs/control-plane"), help="where results are kept")
    add("--most", type=float, default=720.0, help="seconds for all of it (default 720)")
    add("--all", action="store_true", help="all cases at 2,048 agents, two at 512 and 8,192")
    add("--resume", action="store_true", help="with --all: keep what --out has of the cases")
    add("--write", type=Path, metavar="PAGE", help="put the table into this page")
    return parser


def allow_files(agents: int) -> None:
    """Raise the limit of open files of this process, and those that it starts, so that a connection
    for each agent fits. Raises MissingCapability where the hard limit is too low.
    """
    wanted = agents + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise MissingCapability(
                f"{agents} agents need {wanted} open files, and the hard limit is {hard}",
                hint="raise it (ulimit -Hn), or take fewer --agents",
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def run(given: argparse.Namespace, name: str, agents: int, *, most_s: float) -> dict[str, Any]:
    """Play one case at one size in a new folder. Raises ChaosError."""
    if agents < 2 or given.ranks < 1:
        hint = "2 agents of 1, or more"
        raise ScenarioError(f"{agents} agents of {given.ranks} ranks", hint=hint)
    allow_files(agents)
    folder = (given.out / f"{name}-{agents}-{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}").resolve()
    folder.mkdir(parents=True)
    (folder / "token").touch(0o600)
    (folder / "token").write_text(secrets.token_hex(32))
    asked, asks = os.pipe()
    try:
        with socket.create_server((HOST, 0)) as free:
            port = int(free.getsockname()[1])
        case = Case(
            name=name,
            agents=agents,
            ranks=given.ranks,
            ramp=given.ramp or max(20.0, agents / 10),
            rack=max(1, min(given.rack, agents // 2)),
            beat_s=given.beat,
            steady_s=given.steady,
            hold_s=given.hold,
            limit_s=given.limit,
            port=port,
            folder=str(folder),
            asks=asks,
        )
        return play(case, asked, most_s=most_s)
    finally:
        os.close(asked)
        os.close(asks)


def kept(out: Path, name: str, agents: int) -> dict[str, Any] | None:
    """The newest results of a case that was played to its end, None: there are none."""
    for file in sorted(out.glob(f"{name}-{agents}-*/results.json"), reverse=True):
        made: dict[str, Any] = json.loads(file.read_text())
        if not made["problem"]:
            return made
    return None


def run_all(given: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    """Play ALL, as far as the time allows, and append the results to ``found``, case by case. A
    case that fails is one line of them.
    """
    until_s = time.monotonic() + given.most
    for name, agents in ALL:
        made = kept(given.out, name, agents) if given.resume else None
        left_s = until_s - time.monotonic()
        if made is None:
            print(f"{name}, {agents} agents; {left_s:.0f} s left", file=sys.stderr, flush=True)
            try:
                if left_s <= 0:
                    raise InfrastructureError("no time was left", hint="use --resume, or --most")
                made = run(given, name, agents, most_s=left_s)
            except ChaosError as error:
                made = failed(name, agents, given.ranks, error.message)
        found.append(made)


def failed(name: str, agents: int, ranks: int, why: str) -> dict[str, Any]:
    """The results of a case that could not be played."""
    about = {"case": name, "agents": agents, "ranks": agents * ranks, "false_deaths": 0}
    nothing: dict[str, Any] = {"latency_ms": {}, "traffic": None, "coordinator": None}
    return {**about, **nothing, "problem": why.partition("\n")[0][:200]}


def write(page: Path, found: Sequence[dict[str, Any]], on: str) -> None:
    """Put date, commit, machine, goals and table into a page. Raises ScenarioError."""
    said = f"{datetime.now(UTC):%Y-%m-%d}, commit {commit_of()}; {on}."
    text = "\n\n".join(("", said, goals(found), rows(found), ""))
    try:
        page.write_text(placed(text, page.read_text(), BEGIN, END))
    except OSError as error:
        raise ScenarioError(f"cannot write {page}: {error.strerror}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Play what the command line asks for; returns the exit status."""
    given = _parser().parse_args(argv)
    found: list[dict[str, Any]] = []
    on = machine()
    try:
        if find_spec("locust") is None:
            raise MissingCapability("Locust is not installed", hint="pip install '.[load]'")
        if given.write is not None:
            placed("", given.write.read_text() if given.write.is_file() else "", BEGIN, END)
        if given.all:
            run_all(given, found)
        else:
            found.append(run(given, given.case, given.agents, most_s=given.most))
    except ChaosError as error:
        print(f"{error.message}" + (f"; {error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: what was played is kept", file=sys.stderr)
    if given.write is not None and found:
        write(given.write, found, on)
    print(rows(found) if given.all else json.dumps(found, indent=1))
    played = bool(found) and len(found) == (len(ALL) if given.all else 1)
    good = all(not each["problem"] and not each["false_deaths"] for each in found)
    return EXIT_PASS if played and good else EXIT_FAIL


if __name__ == "__main__":
    sys.exit(main())
