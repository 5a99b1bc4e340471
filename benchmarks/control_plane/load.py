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
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.control_plane.cases import CASE_VARIABLE, CASES, Case
from benchmarks.control_plane.measure import results
from benchmarks.control_plane.page import machine, rows, write
from benchmarks.control_plane.processes import Held, allow_files, free_port
from trainchaos.chaos.errors import (
    EXIT_FAIL,
    EXIT_PASS,
    ChaosError,
    InfrastructureError,
    MissingCapability,
    ScenarioError,
)

ROOT = Path(__file__).resolve().parents[2]
LOCUSTFILE = Path(__file__).with_name("locustfile.py")
ALL = (
    *((name, 2048) for name in ("rack", "steady", "tenth", "restart", "cuts", "slow", "lying")),
    *((name, 512) for name in ("steady", "rack")),
    *((name, 8192) for name in ("steady", "rack")),
)
"""Cases and agents of ``--all``: what the goals are about first.
"""
LOOK_S = 0.5
HOST = "127.0.0.1"
LISTENS_LIMIT_S = 60.0


def play(case: Case, folder: Path, asked: int, *, most_s: float) -> dict[str, Any]:
    """Play a case in its folder; returns its results, which are written there as well. ``asked``:
    the end of the pipe on which Locust asks for a restart; ``most_s``: for all of it. Raises
    InfrastructureError.
    """
    case.write(folder / "case.json")
    begun_s = time.monotonic()
    coordinator = _coordinator(case, folder)
    locust: Held | None = None
    try:
        _await_listening(coordinator)
        coordinator.sample()
        locust = _locust(case, folder)
        while not locust.ended:
            if time.monotonic() > begun_s + most_s:
                raise InfrastructureError(
                    f"{case.name} with {case.agents} agents took longer than {most_s:.0f} s",
                    hint="use fewer --agents, or a machine that nobody else uses",
                )
            if _look(coordinator, locust, asked):
                coordinator.close()
                coordinator = _coordinator(case, folder, "--adopt", after=coordinator)
            elif coordinator.ended:
                raise InfrastructureError(
                    f"the coordinator ended: {coordinator.said()}", hint="see its output"
                )
    finally:
        for held in (locust, coordinator):
            if held is not None:
                held.close()
    try:
        found = json.loads(Path(case.out).read_text())
    except (OSError, ValueError) as error:
        raise InfrastructureError(
            f"Locust noted nothing: {locust.said()}", hint=f"see {folder}"
        ) from error
    made = results(
        case,
        found,
        events=folder / "events",
        coordinator=coordinator.samples,
        agents=locust.samples,
        wall_s=time.monotonic() - begun_s,
    )
    (folder / "results.json").write_text(json.dumps(made, indent=1) + "\n")
    return made


def _look(coordinator: Held, locust: Held, asked: int) -> bool:
    """Wait for a moment and sample both; whether Locust asks for a restart."""
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    poll.register(locust.pidfd, select.POLLIN)
    ready = [fd for fd, _ in poll.poll(LOOK_S * 1000)]
    coordinator.sample()
    locust.sample()
    return asked in ready and bool(os.read(asked, 64))


def _coordinator(case: Case, folder: Path, *more: str, after: Held | None = None) -> Held:
    """Start the coordinator of a case; ``after``: the one before, whose samples it continues."""
    script = folder / "train.py"
    script.write_text('"""The script that the ranks would run."""\n')
    command = [
        sys.executable,
        "-m",
        "benchmarks.control_plane.coordinator",
        case.probe,
        *("--ranks", str(case.agents * case.ranks), "--nodes", str(case.agents)),
        *("--listen", f"{case.host}:{case.port}", "--token-file", case.token),
        *("--strategy", "drop-replica", "--param", "rejoin=false", "--device", "cpu"),
        *("--verify-every", "0", "--hang-timeout", "30", "--events", str(folder / "events")),
        *more,
        str(script),
    ]
    held = Held(command, folder / "coordinator.txt", environment=_environment())
    held.samples = after.samples if after is not None else []
    return held


def _locust(case: Case, folder: Path) -> Held:
    command = [
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"),
        *("--html", str(folder / "locust.html"), "--json-file", str(folder / "locust")),
        *("--stop-timeout", "1"),
    ]
    environment = _environment() | {CASE_VARIABLE: str(folder / "case.json")}
    return Held(command, folder / "locust.txt", environment=environment, passed=[case.asks])


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return dict(os.environ) | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _await_listening(coordinator: Held) -> None:
    """Until it says that it awaits its agents. Raises InfrastructureError."""
    until_s = time.monotonic() + LISTENS_LIMIT_S
    poll = select.poll()
    poll.register(coordinator.pidfd, select.POLLIN)
    while "are to dial" not in coordinator.said():
        if poll.poll(50) or time.monotonic() > until_s:
            raise InfrastructureError(
                f"the coordinator does not listen: {coordinator.said()}", hint="see its output"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.control_plane.load",
        description="The real coordinator under the load of simulated node agents.",
    )
    add = parser.add_argument
    add("--agents", type=int, default=64, help="node agents (default 64)")
    add("--ranks", type=int, default=8, help="ranks of each (default 8)")
    add("--case", choices=tuple(CASES), default="steady", help="what happens (default steady)")
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


def case_of(given: argparse.Namespace, name: str, agents: int, folder: Path, asks: int) -> Case:
    """The case that the options describe. Raises ScenarioError for sizes that make none."""
    if agents < 2 or given.ranks < 1:
        raise ScenarioError(
            f"{agents} agents of {given.ranks} ranks", hint="2 agents of 1, or more"
        )
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    return Case(
        name=name,
        agents=agents,
        ranks=given.ranks,
        ramp=given.ramp or max(20.0, agents / 10),
        rack=max(1, min(given.rack, agents // 2)),
        beat_s=given.beat,
        step_s=given.beat,
        steady_s=given.steady,
        hold_s=given.hold,
        limit_s=given.limit,
        host=HOST,
        port=free_port(),
        token=str(token),
        probe=str(folder / "probe"),
        out=str(folder / "found.json"),
        asks=asks,
    )


def run(given: argparse.Namespace, name: str, agents: int, *, most_s: float) -> dict[str, Any]:
    """Play one case at one size in a new folder. Raises ChaosError."""
    allow_files(agents)
    folder = (given.out / f"{name}-{agents}-{datetime.now(UTC):%Y-%m-%dT%H-%M-%S}").resolve()
    folder.mkdir(parents=True)
    asked, asks = os.pipe()
    try:
        case = case_of(given, name, agents, folder, asks)
        return play(case, folder, asked, most_s=most_s)
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
    return {
        "case": name,
        "agents": agents,
        "ranks": agents * ranks,
        "problem": why.partition("\n")[0][:200],
        "latency_ms": {},
        "traffic": None,
        "coordinator": None,
        "false_deaths": 0,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Play what the command line asks for; returns the exit status."""
    given = _parser().parse_args(argv)
    found: list[dict[str, Any]] = []
    on = machine()
    try:
        if find_spec("locust") is None:
            raise MissingCapability("Locust is not installed", hint="pip install '.[load]'")
        if given.write is not None and not given.write.is_file():
            raise ScenarioError(f"no page {given.write}")
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
        write(given.write, found, on=on, commit=commit_of(ROOT))
    print(rows(found) if given.all else json.dumps(found, indent=1))
    played = bool(found) and len(found) == (len(ALL) if given.all else 1)
    good = all(not each["problem"] and not each["false_deaths"] for each in found)
    return EXIT_PASS if played and good else EXIT_FAIL


def commit_of(root: Path) -> str:
    """The commit of a checkout, short, and whether it was changed since; "unknown" elsewhere."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=8"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
