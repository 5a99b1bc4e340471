"""Starts a DLRover master for one job on this machine, and its agent ``dlrover-run`` with
``dlrover_train``.

``dlrover-run --standalone`` would start the master itself, and cannot with torch 2.13 (torch's
``SubprocessHandler`` wants an argument that DLRover 0.6.1 does not give); the agent finds one that
is there by DLROVER_MASTER_ADDR. Arguments: further options of ``dlrover-run``.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from trainchaos.harness.host.processes import listens
from trainchaos.harness.peers.supervise import PeerLauncher, free_ports, job_of_environment


def main() -> int:
    """The exit code of the agent."""
    job = job_of_environment()
    name, port = f"job-{secrets.token_hex(6)}", free_ports(1)
    env = os.environ | {"DLROVER_MASTER_ADDR": f"127.0.0.1:{port}", "ELASTIC_JOB_NAME": name}
    with PeerLauncher(leftovers(name)) as launcher:
        master = launcher.start(master_command(name, port), env)
        launcher.wait_for(lambda: listens(port), master, "the DLRover master")
        return launcher.wait(launcher.start(agent_command(job.ranks, sys.argv[1:]), env))


def master_command(name: str, port: int) -> list[str]:
    """As ``dlrover-run --standalone`` starts it."""
    module = [sys.executable, "-m", "dlrover.python.master.main"]
    return [
        *module,
        "--port",
        str(port),
        "--node_num",
        "1",
        "--job_name",
        name,
        "--platform",
        "local",
    ]


def agent_command(ranks: int, options: list[str]) -> list[str]:
    """``dlrover-run``."""
    module = [sys.executable, "-m", "dlrover.trainer.torch.elastic_run", "--standalone"]
    return [
        *module,
        f"--nproc-per-node={ranks}",
        *options,
        "-m",
        "trainchaos.harness.peers.dlrover_train",
    ]


def leftovers(name: str) -> list[Path]:
    """Sockets and shared memory that DLRover names after the job, and leaves behind."""
    return [Path("/tmp/ckpt_sock") / name, Path("/dev/shm") / f"{name}_ckpt_shm_0"]


if __name__ == "__main__":
    sys.exit(main())
