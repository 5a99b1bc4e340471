"""``python -m trainchaos.recovery.nodes.serve``: an agent as a process of its own, for
``recovery.run --nodes``; ``chaos agent`` is the same for the harness.

SIGTERM reports to the coordinator and the ranks that the node will be ended soon, and ends nothing;
SIGINT ends the agent.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError, InfrastructureError, ScenarioError
from trainchaos.recovery.health.checks import check_command
from trainchaos.recovery.nodes.agent.agent import LEASE_S, AgentConfig, NodeAgent
from trainchaos.recovery.nodes.coordinator.software import versions
from trainchaos.recovery.nodes.link.files import refuse_shared
from trainchaos.recovery.process.forkserver import LaunchRecipe
from trainchaos.recovery.process.local import script_recipe
from trainchaos.recovery.process.output import say, shield

MIN_TOKEN = 16
EXIT_ABANDONED = 1
"""Exit code of an agent whose lease has run out: the node is not done, and what started it may
start it anew.
"""


def read_token(path: Path) -> bytes:
    """The run's token from a file that only its owner may read. Raises ScenarioError."""
    try:
        text, mode = path.read_text().strip(), path.stat().st_mode
    except OSError as error:
        raise ScenarioError(f"cannot read the token in {path}: {error.strerror}") from error
    except ValueError as error:  # it is no text
        raise ScenarioError(f"the token in {path} is not hexadecimal") from error
    if mode & 0o077:
        raise ScenarioError(f"others may read the token in {path}", hint=f"chmod 600 {path}")
    try:
        token = bytes.fromhex(text)
    except ValueError as error:
        raise ScenarioError(f"the token in {path} is not hexadecimal") from error
    if len(token) < MIN_TOKEN:
        raise ScenarioError(
            f"the token in {path} has {len(token)} bytes, under {MIN_TOKEN}",
            hint="openssl rand -hex 32",
        )
    return token


def address_of(text: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``. Raises ScenarioError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ScenarioError(f"not HOST:PORT: {text!r}")
    return host, int(port)


def devices() -> tuple[str, ...]:
    """Devices that torch can use here, by NVML and the environment; torch itself is not
    imported.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([word for word in visible.split(",") if word and word != "-1"])
        return tuple(f"cuda:{index}" for index in range(count))
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(f"cuda:{index}" for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def serve(
    *,
    coordinator: str,
    node: int,
    address: str,
    token_file: Path,
    scratch: Path,
    lease_s: float,
    recipe: LaunchRecipe,
    coordinator_boot: str = "",
    reports: Path | None = None,
) -> int:
    """Run an agent until it is told to end; returns the exit code. ``coordinator``: ``HOST:PORT``.
    An agent that its coordinator never admitted, by its token or because another has its number,
    ends with EXIT_USAGE when its lease has run out.

    Raises ScenarioError, InfrastructureError.
    """
    config = AgentConfig(
        coordinator=address_of(coordinator),
        node=node,
        address=address,
        token=read_token(token_file),
        scratch=scratch.resolve(),
        lease_s=lease_s,
        devices=devices(),
        versions=versions(),
        recipe=recipe,
        coordinator_boot=coordinator_boot,
        reports=reports,
        check=check_command(),
    )
    try:
        config.scratch.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InfrastructureError(
            f"cannot make {config.scratch}: {error.strerror}", hint="name another --scratch"
        ) from error
    refuse_shared(config.scratch)
    agent = NodeAgent(config)
    signal.signal(signal.SIGTERM, lambda signum, frame: agent.warn())
    signal.signal(signal.SIGINT, lambda signum, frame: agent.end("interrupted"))
    say(f"ends: {agent.run()}", who=f"agent of node {node}")
    if agent.rejected:
        return EXIT_USAGE
    return EXIT_ABANDONED if agent.abandoned else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and serve; returns the exit code."""
    parser = argparse.ArgumentParser(prog="trainchaos.recovery.nodes.serve", description=__doc__)
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT")
    parser.add_argument("--node", required=True, type=int)
    parser.add_argument(
        "--address", default="", help="of this node, as other nodes reach it; found out"
    )
    parser.add_argument("--token-file", required=True, type=Path)
    parser.add_argument(
        "--scratch", type=Path, help="for what its processes write; a new directory, removed"
    )
    parser.add_argument("--lease", type=float, default=LEASE_S, metavar="SECONDS")
    parser.add_argument(
        "--health-reports",
        type=Path,
        metavar="FILE",
        help="to which monitors of this node append reports, a JSON line each (docs/health.md)",
    )
    boot = "id of the boot of the coordinator's machine, if it may be this one"
    parser.add_argument("--boot", default="", help=boot)
    parser.add_argument(
        "--entry", metavar="MODULE:FUNCTION", help="of warm processes; for recovery.run"
    )
    parser.add_argument(
        "--cold", metavar="MODULE", help="that a cold process runs; for recovery.run"
    )
    parser.add_argument(
        "--module", action="append", help="to import before forking; for recovery.run"
    )
    args = parser.parse_args(argv)
    usual = script_recipe()
    recipe = LaunchRecipe(
        entry=args.entry or usual.entry,
        cold=args.cold or usual.cold,
        modules=args.module or usual.modules,
        environment=usual.environment,
    )
    # An agent that is killed leaves it behind: it is made only where nobody gave one.
    own = (
        nullcontext(args.scratch) if args.scratch else TemporaryDirectory(prefix="recovery-agent-")
    )
    try:
        with own as scratch:
            return serve(
                coordinator=args.coordinator,
                node=args.node,
                address=args.address,
                token_file=args.token_file,
                scratch=Path(scratch),
                lease_s=args.lease,
                recipe=recipe,
                coordinator_boot=args.boot,
                reports=args.health_reports,
            )
    except ChaosError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    shield()
    sys.exit(main())
