"""Runs a function in several real processes that can meet in process groups, and lets a test break
them.

Processes are forked from a server that has imported torch, so that each is there in milliseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from tests.support.running import LIMIT_S, until
from trainchaos.recovery.collectives.group import LEAVING, GenerationLost, Group
from trainchaos.recovery.collectives.storelink import StoreLink
from trainchaos.recovery.policy.mesh import Mesh
from trainchaos.recovery.process.local import start_store

_CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = [
    "torch._dynamo",
    "trainchaos.recovery.collectives.sharded",
    "trainchaos.recovery.collectives.transfer",
    "pytest",
]
_CONTEXT.set_forkserver_preload(PRELOAD)

Task = Callable[["Self"], Any]


def meet(group: Group) -> None:
    """Wait until every rank has formed ``group``: one that leaves before breaks it for the others.

    In a job the supervisor sees to it.
    """
    group.wait(group.start_all_reduce(torch.ones(1)))


class Self:
    """One process, seen from inside: makes groups, and aborts them when the test says so."""

    def __init__(self, rank: int, world: int, port: int, pipe: Connection) -> None:
        self.rank = rank
        self.world = world
        self.aborted = 0
        self.port = port
        self._pipe = pipe
        self._group: Group | None = None
        self._orders = threading.Condition()
        self._inbox: list[Any] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def check(self) -> None:
        """What a job does."""
        if self._group is not None and self.aborted >= self._group.generation:
            raise GenerationLost("aborted")

    def group(
        self,
        generation: int = 1,
        *,
        rank: int | None = None,
        world: int | None = None,
        shards: int = 1,
        mesh: Mesh | None = None,
        link: StoreLink | None = None,
    ) -> Group:
        """A group not formed yet."""
        self._group = Group(
            generation=generation,
            rank=self.rank if rank is None else rank,
            world=world or self.world,
            store_port=self.port,
            backend="gloo",
            timeout_s=LIMIT_S,
            check=self.check,
            mesh=mesh or Mesh(shard=shards),
            link=link,
        )
        return self._group

    def say(self, what: Any) -> None:
        """Tell the test."""
        self._pipe.send(("said", what))

    def hear(self) -> Any:
        """What the test told, except aborts."""
        with self._orders:
            assert self._orders.wait_for(lambda: self._inbox, LIMIT_S), "the test said nothing"
            return self._inbox.pop(0)

    def _listen(self) -> None:
        while True:
            try:
                order = self._pipe.recv()
            except EOFError:
                os._exit(3)
            if isinstance(order, tuple) and order[0] == "abort":
                self.aborted = order[1]
                while (group := self._group) is not None and group.generation <= order[1]:
                    group.abort()
                    if self._left.wait(0.005):
                        break
            else:
                with self._orders:
                    self._inbox.append(order)
                    self._orders.notify()

    _left = threading.Event()

    def leave(self) -> None:
        """Leave the current group."""
        assert self._group is not None
        self._group.leave()
        self._left.set()
        self._group = None

    def settle(self) -> None:
        """Wait until what was left is gone."""
        until(lambda: not any(one.name == LEAVING for one in threading.enumerate()))

    def entered(self) -> None:
        """Another group is about to be used."""
        self._left.clear()


def _main(task: Task, rank: int, world: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        result = task(Self(rank, world, port, pipe))
        pipe.send(("done", result))
    except BaseException as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        os._exit(0)


@dataclass
class Rank:
    """One process, seen from the test."""

    process: BaseProcess
    pipe: Connection

    def next(self, kind: str) -> Any:
        """What it says, or its result (``done``)."""
        assert self.pipe.poll(LIMIT_S), f"process {self.process.pid} said nothing"
        found, value = self.pipe.recv()
        assert found == kind, (found, value)
        return value

    def unread(self) -> list[Any]:
        """What it has said and nobody has asked for."""
        found = []
        with contextlib.suppress(EOFError, OSError):
            while self.pipe.poll():
                found.append(self.pipe.recv())
        return found

    def result(self) -> Any:
        """What its function returned."""
        return self.next("done")

    def said(self) -> Any:
        """What it said."""
        return self.next("said")

    def tell(self, what: Any) -> None:
        """Send it something."""
        self.pipe.send(what)

    def signal(self, number: signal.Signals) -> None:
        """Signal it."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


@contextmanager
def ranks(task: Task, world: int) -> Iterator[list[Rank]]:
    """So many processes running ``task``; all gone afterwards."""
    store, port = start_store()
    started: list[Rank] = []
    try:
        for rank in range(world):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_main, args=(task, rank, world, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            started.append(Rank(process, ours))
        yield started
    except BaseException as error:
        for number, rank in enumerate(started):
            error.add_note(f"rank {number} still had to say: {rank.unread()}")
        raise
    finally:
        for rank in started:
            rank.process.kill()
        for rank in started:
            rank.process.join(LIMIT_S)
            rank.pipe.close()
        del store


def results(task: Task, world: int) -> list[Any]:
    """What every process returned, by rank."""
    with ranks(task, world) as started:
        return [rank.result() for rank in started]
