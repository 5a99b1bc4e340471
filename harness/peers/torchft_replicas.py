"""A torchft job on one machine: its lighthouse, and a replica for each rank, started again when it
ends abnormally.

    python -m trainchaos.harness.peers.torchft_replicas --restarts 3 --lighthouse "..." -- options

``--lighthouse``: options of ``torchft_lighthouse``, beside ``--bind``;
``harness.peers.torchft_train`` gets the rest. Every replica has a ``RANK`` of its own, by which it
is known from outside; torchft itself is told rank 0 of 1, as each replica is a group of one. A
replica waits for the lighthouse as long as ``Manager(connect_timeout)`` says, a minute.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

from trainchaos.harness.peers.supervise import (
    HOST,
    PeerSupervisor,
    free_ports,
    job_of_environment,
)


def main() -> None:
    """The lighthouse and the replicas, all at once."""
    parser = argparse.ArgumentParser(
        prog="python -m trainchaos.harness.peers.torchft_replicas", description=__doc__
    )
    parser.add_argument("--restarts", type=int, default=0, help="of each replica")
    parser.add_argument("--lighthouse", required=True, help="options of torchft_lighthouse")
    parser.add_argument("script", nargs="*", help="options of harness.peers.torchft_train")
    options = parser.parse_args()
    replicas = job_of_environment().ranks
    if find_spec("torchft") is None:
        raise SystemExit(
            f"torchft is not installed for {sys.executable}\n  chaos stacks install torchft"
        )
    port = free_ports(1)
    env = {"RUST_LOG": "warn", **os.environ, "TORCHFT_LIGHTHOUSE": f"http://{HOST}:{port}"}
    program = str(Path(sys.executable).parent / "torchft_lighthouse")
    lighthouse = ([program, "--bind", f"[::]:{port}", *shlex.split(options.lighthouse)], env)
    numbered = [
        env
        | {
            "RANK": str(one),
            "WORLD_SIZE": str(replicas),
            "REPLICA_GROUP_ID": str(one),
            "NUM_REPLICA_GROUPS": str(replicas),
        }
        for one in range(replicas)
    ]
    command = [sys.executable, "-m", "trainchaos.harness.peers.torchft_train", *options.script]
    supervisor = PeerSupervisor(
        command, numbered, restarts=options.restarts, beside={"torchft_lighthouse": lighthouse}
    )
    sys.exit(supervisor.run())


if __name__ == "__main__":
    main()
