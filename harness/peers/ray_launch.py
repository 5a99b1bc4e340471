"""Runs ``harness.peers.ray_train`` and ends the Ray cluster that it starts, however it ends.

``ray.init`` starts a cluster of its own below the driver, in a session directory that nobody else
uses; its daemons are found by descent, and ``ray stop``, which ends by name whatever is Ray's on
the machine, is never used.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from pathlib import Path

from trainchaos.harness.peers.supervise import PeerLauncher, job_of_environment


def main() -> int:
    """The exit code of the driver."""
    job_of_environment()
    home = Path(tempfile.mkdtemp(prefix="ray-"))  # sockets lie there, whose paths have to be short
    with PeerLauncher([home]) as launcher:
        env = os.environ | {
            "JOB_RAY_HOME": str(home),
            "TMPDIR": str(home),
            "RAY_USAGE_STATS_ENABLED": "0",
            # else one is left in the home directory
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        return launcher.wait(
            launcher.start([sys.executable, "-m", "trainchaos.harness.peers.ray_train"], env)
        )


if __name__ == "__main__":
    sys.exit(main())
