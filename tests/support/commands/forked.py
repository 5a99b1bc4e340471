"""Command lines in processes of their own, each forked from one that has imported all there is: to
start Python takes longer than most commands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.support.running import LIMIT_S, readable

_SERVER = """
import importlib, json, os, pkgutil, sys
from trainchaos.chaos import cli
from trainchaos.chaos import faults
from trainchaos.harness import launchers, workloads
from trainchaos.harness.judge import checkers
from trainchaos.recovery.policy import strategies

for package in (faults, launchers, workloads, strategies):
    for found in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{found.name}")
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if not child:
        code = 99
        try:
            os.chdir(asked["at"])
            os.environ.clear()
            os.environ.update(asked["env"])
            sys.path[1:1] = asked["path"]
            for name, number in (("in", 0), ("out", 1), ("err", 2)):
                os.dup2(os.open(asked[name], os.O_RDWR | os.O_CREAT, 0o600), number)
            sys.argv = ["chaos", *asked["words"]]
            code = cli.invoke(asked["words"])
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Commands:
    """Runs ``chaos`` as ``python -m trainchaos`` does."""

    def __enter__(self) -> Commands:
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.kill()
        self._server.communicate(timeout=LIMIT_S)

    def run(
        self, words: Sequence[str], *, at: Path, env: Mapping[str, str], path: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """One command line in a directory. ``path``: of more modules."""
        asking, answering = self._server.stdin, self._server.stdout
        assert asking is not None
        assert answering is not None
        with tempfile.TemporaryDirectory() as place:
            said = {name: f"{place}/{name}" for name in ("out", "err")}
            asked = {"words": list(words), "at": str(at), "env": dict(env), "path": list(path)}
            asking.write(json.dumps(asked | said | {"in": os.devnull}).encode() + b"\n")
            asking.flush()
            assert readable(answering), "it does not end"
            code = int(answering.readline())
            out, err = (Path(said[name]).read_text(encoding="utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess(list(words), code, out, err)
