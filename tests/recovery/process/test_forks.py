"""What a rank finds when it is forked: all that its first step needs, and nothing to look through
for garbage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import gc, json, os, sys

def start(config, control_fd, mark_fd):
    frozen, before = gc.get_freeze_count(), set(sys.modules)
    import torch
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(2)
    optimizer.step()
    "localhost".encode("idna")
    os.write(control_fd, json.dumps([frozen, sorted(set(sys.modules) - before)]).encode())
    os._exit(0)
"""
DRIVER = """
import os
from trainchaos.recovery.process import processes
from trainchaos.recovery.process.forkserver import ForkServer
from trainchaos.recovery.process.local import script_recipe

processes.become_subreaper()
recipe = script_recipe()
server = ForkServer("probe:start", recipe.modules, {**os.environ, **recipe.environment})
try:
    reader, writer = os.pipe()
    pid = server.fork(b"x", [writer, writer])
    os.waitpid(pid, 0)
    os.close(writer)
    print(os.read(reader, 1 << 16).decode())
finally:
    server.close()
"""


@pytest.mark.real
def test_a_fork_has_all_that_its_first_step_needs_and_no_garbage_to_look_for(
    tmp_path: Path,
) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    frozen, imported = json.loads(done.stdout)
    assert frozen > 100_000, "torch has more objects"
    assert imported == [], "the others would wait for it"
