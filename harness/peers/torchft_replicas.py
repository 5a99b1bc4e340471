"""A torchft job on one machine: its lighthouse, and a replica for each rank, started again when it ends abnormally.

    python -m harness.peers.torchft_replicas --replicas 4 --restarts 3 --lighthouse "--min_replicas 1 ..." -- options

``--lighthouse``: options of ``torchft_lighthouse``, beside ``--bind``; ``harness.peers.torchft_train`` gets the rest.
Every replica has a ``RANK`` of its own, by which it is known from outside; torchft itself is told rank 0 of 1, as each
replica is a group of one.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from harness.peers import supervise
from recovery import processes


def main() -> None:
    """Both at once: a replica waits for the lighthouse as long as ``Manager(connect_timeout)`` says, a minute."""
    parser = argparse.ArgumentParser(prog="python -m harness.peers.torchft_replicas", description=__doc__)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--restarts", type=int, default=0, help="of each replica")
    parser.add_argument("--lighthouse", required=True, help="options of torchft_lighthouse")
    parser.add_argument("script", nargs="*", help="options of harness.peers.torchft_train")
    options = parser.parse_args()
    if find_spec("torchft") is None:
        sys.exit(f"torchft is not installed for {sys.executable}: chaos stacks install torchft")
    supervise.prepare()
    port = supervise.free_ports(1)
    lighthouse = start_lighthouse(port, shlex.split(options.lighthouse))
    command = [sys.executable, "-m", "harness.peers.torchft_train", *options.script]
    environments = [
        {
            "RANK": str(rank), "WORLD_SIZE": str(options.replicas), "REPLICA_GROUP_ID": str(rank),
            "NUM_REPLICA_GROUPS": str(options.replicas), "TORCHFT_LIGHTHOUSE": f"http://{supervise.HOST}:{port}",
            "RUST_LOG": os.environ.get("RUST_LOG", "warn"),
        }
        for rank in range(options.replicas)
    ]  # fmt: skip
    beside = {lighthouse.pid: "torchft_lighthouse"}
    sys.exit(supervise.Supervisor(command, environments, restarts=options.restarts, beside=beside).run())


def start_lighthouse(port: int, options: list[str]) -> subprocess.Popen[bytes]:
    """The coordinator of torchft, from the environment of this interpreter."""
    program = Path(sys.executable).parent / "torchft_lighthouse"
    lighthouse = subprocess.Popen(
        [str(program), "--bind", f"[::]:{port}", *options], stdin=subprocess.DEVNULL,
        env=os.environ | {"RUST_LOG": os.environ.get("RUST_LOG", "warn")},
        preexec_fn=partial(processes.die_with, os.getpid()),
    )  # fmt: skip
    lighthouse.returncode = 0  # reaped by the supervisor, with everything else
    return lighthouse


if __name__ == "__main__":
    main()
