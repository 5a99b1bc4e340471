"""Ways to slow a rank's computation: sleeping, real contention for its core or GPU, a real
quota.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from trainchaos.harness.launch.cgroups import CgroupControl

COMPUTE = ("forward", "backward", "optimizer")
BURN_ROUNDS = 20_000  # about 10 ms of a core, without the interpreter's lock
JOIN_LIMIT_S = 5.0


class Slowness:
    """Slows one rank. ``sleep``: must show progress meanwhile; ``group``: name of the arm's control
    groups, if it has any.

    The training thread calls everything except ``began``.
    """

    def __init__(self, *, process: str, group: str | None, sleep: Callable[[float], None]) -> None:
        self._process = process
        self._groups = CgroupControl(group, lambda _: os.getpid()) if group is not None else None
        self._sleep = sleep
        self._factor = 1.0
        self._burners: list[_Burner] = []
        self._cores: set[int] | None = None
        self._since = (time.process_time(), time.monotonic())

    def began(self) -> None:
        """A generation starts: measure the rank's processor time from here."""
        self._since = (time.process_time(), time.monotonic())

    def set(self, factor: float, mode: str) -> str:
        """Make computation take ``factor`` times as long (1: full speed); returns how."""
        self._release()
        if factor <= 1:
            return "full speed"
        if mode == "cpu-contention":
            return self._compete(factor)
        if mode == "cgroup-quota":
            return self._ration(factor)
        if mode == "sm-contention":
            return self._compete_on_gpu(factor)
        self._factor = factor
        return "sleeps"

    def ended(self, phase: str, seconds: float) -> None:
        """A phase took ``seconds``."""
        if self._factor > 1 and phase in COMPUTE:
            self._sleep((self._factor - 1) * seconds)

    def _release(self) -> None:
        self._factor = 1.0
        for burner in self._burners:
            burner.stop()
        self._burners = []
        if self._cores is not None:
            os.sched_setaffinity(0, self._cores)
            self._cores = None
        if self._groups is not None:
            self._groups.release(self._process)

    def _compete(self, factor: float) -> str:
        """Burn one core with threads, and bind the training thread to it. Uses twice the threads
        that ``factor`` needs: if ranks share cores already, fewer would hardly be noticed.
        """
        self._cores = os.sched_getaffinity(0)
        core = sorted(self._cores)[os.getpid() % len(self._cores)]
        count = 2 * math.ceil(factor) - 1
        os.sched_setaffinity(0, {core})  # inherited by the threads
        self._burners = [_Burner(_burn) for _ in range(count)]
        return f"{count} threads on core {core}"

    def _ration(self, factor: float) -> str:
        """Set a quota: its processor time so far, divided by the factor."""
        if self._groups is None:
            return "nothing: there are no control groups here"
        used, wall = time.process_time() - self._since[0], time.monotonic() - self._since[1]
        share = min(1.0, used / max(wall, 1e-3)) / factor
        self._groups.limit_cores([self._process], share)
        return f"quota of {share:.3f} cores"

    def _compete_on_gpu(self, factor: float) -> str:
        import torch

        if not torch.cuda.is_available():
            return "nothing: there is no CUDA device"
        self._burners = [_Burner(_gpu_work(torch.device("cuda", torch.cuda.current_device())))]
        return "matrix products on a stream of their own"


class _Burner:
    """A thread that repeats a piece of work until it is stopped."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="burner", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop it and wait for it, at most JOIN_LIMIT_S."""
        self._stopped.set()
        self._thread.join(JOIN_LIMIT_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._work()


def _burn() -> None:
    hashlib.pbkdf2_hmac("sha256", b"burn", b"core", BURN_ROUNDS)


def _gpu_work(device: Any) -> Callable[[], None]:
    import torch

    stream = torch.cuda.Stream(device)
    matrix = torch.randn(4096, 4096, device=device)
    stream.wait_stream(torch.cuda.current_stream(device))  # that stream makes the matrix

    def work() -> None:
        with torch.cuda.stream(stream):
            for _ in range(8):
                torch.mm(matrix, matrix)
        stream.synchronize()

    return work
