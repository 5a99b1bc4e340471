"""What NCCL does otherwise than gloo: communicators are made, left and waited for as torch's
ProcessGroupNCCL needs it.

- Everything runs on the stream of a device: ``Work.wait`` has that stream wait, not the host. A
  kernel that was aborted ends like any other and leaves garbage, so the host has to ask whether
  there was an abort after it has waited.
- An operation runs on a stream of NCCL's own, so that its tensors may only be let go of after
  ``Work.wait``: else their memory would be given to whoever asks next. The group holds them until
  then.
- A communicator is made by the first collective of a group, which waits in the host for all members
  and cannot be aborted before it is registered. It is made on a thread that can be left behind.
- The watchdog of torch ends the process when a collective fails. The supervisor decides that here,
  see WATCHDOG.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainchaos.recovery.process.local import NCCL_WATCHDOG

LOOK_S = 0.0001  # between two looks at a device that is waited for
SPIN_S = 0.0003  # before them: most waits are short
ABORTING = "abort-group"  # the threads that break communicators
ABORT_S = 0.02  # longest wait for communicators to be aborted


def watchdog() -> None:
    """Keep torch's watchdog from ending this process. Its supervisor sets this at its start; a rank
    that was started otherwise does it before its first group, while no thread of NCCL has read the
    environment yet.
    """
    missing = {
        name: value for name, value in NCCL_WATCHDOG.items() if os.environ.get(name) != value
    }
    if missing:
        os.environ.update(missing)


def be_a_host_of_its_own() -> None:
    """Let this process share a GPU with other ranks, before its first group.

    NCCL refuses two ranks of one host on one GPU, and tells hosts apart by a hash of their name,
    which NCCL_HOSTID replaces (NCCL's documentation of environment variables). Ranks then exchange
    over sockets, also those on different GPUs: slow, and the way to try NCCL's failures on one GPU.
    """
    os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{os.getpid()}"


def recorder(name: str) -> Callable[..., Any] | None:
    """The function with a name by which torch's flight recorder is read, of any backend; None where
    this torch has none.
    """
    return getattr(getattr(torch._C, "_distributed_c10d", None), name, None)


def meet(store: dist.Store, place: int, size: int, timeout: timedelta, name: str = "") -> Any:
    """Torch's process group; no rank is connected yet. ``name``: its own in the flight recorder.
    Raises ValueError where there is no GPU.
    """
    watchdog()
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.group_name = name
    return dist.ProcessGroupNCCL(store, place, size, options)


def connect(made: Any, probe: Tensor) -> dist.Work:
    """Make the communicator, and wait for the other members in it. ``probe``: one value on the
    device, which is still under way then.
    """
    return made.allreduce([probe])  # type: ignore[no-any-return]


class CommunicatorAborter:
    """Aborts the communicators of groups, all at once: one alone may wait for the kernels of
    another.

    Each on a thread of its own, since NCCL may not come back from it.
    """

    def __init__(self) -> None:
        self._begun: dict[int, threading.Thread] = {}
        # the agent's thread aborts, and the training thread leaves
        self._lock = threading.Lock()

    def abort(self, groups: Iterable[Any]) -> None:
        """Safe to repeat, and to be repeated where a communicator may be registered late. Waits for
        ABORT_S at most.
        """
        with self._lock:
            for made in list(groups):
                thread = self._begun.get(id(made))
                if thread is None or not thread.is_alive():
                    call = made.abort
                    thread = threading.Thread(
                        target=_quietly, args=(call,), name=ABORTING, daemon=True
                    )
                    self._begun[id(made)] = thread
                    thread.start()
            begun = list(self._begun.values())
        deadline_s = time.monotonic() + ABORT_S
        for thread in begun:
            thread.join(max(0.0, deadline_s - time.monotonic()))


def await_device(device: torch.device, look: Callable[[], None]) -> None:
    """Wait until everything that was given to the current stream of ``device`` is done; ``look`` is
    called meanwhile, and may raise.
    """
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    spin_s = time.monotonic() + SPIN_S
    while not event.query():
        look()
        if time.monotonic() > spin_s:
            time.sleep(LOOK_S)


def _quietly(call: Callable[[], None]) -> None:
    try:
        call()
    except RuntimeError:
        pass  # an error of a broken group does not matter
