"""The keeper of one node: a process that holds what the node's ranks save in memory, and copies for
a peer node.

``python -m trainchaos.recovery.checkpoint.memory.keeper CONTROL MARK CONFIG`` (descriptors, as any
cold start; the second is not used), or a fork of the fork server, which starts within milliseconds.
It ends with its supervisor. Each connection has a thread; a bad request is answered or logged, and
ends only that connection.
"""

from __future__ import annotations

import math
import os
import select
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field

from trainchaos.recovery.checkpoint.memory import KEPT, protocol
from trainchaos.recovery.checkpoint.memory.header import Header, Key
from trainchaos.recovery.checkpoint.memory.keeper_store import KeeperStore
from trainchaos.recovery.checkpoint.memory.peers import (
    ASK_LIMIT_S,
    Address,
    Announcer,
    Peers,
    receive_part,
)
from trainchaos.recovery.checkpoint.memory.protocol import (
    Ask,
    Coming,
    Fetch,
    Forget,
    Found,
    Held,
    Kept,
    Note,
    Notes,
    Offer,
    Put,
    Refusal,
    Refused,
)
from trainchaos.recovery.process.output import say
from trainchaos.recovery.process.processes import die_with, redirect_output
from trainchaos.recovery.transport import auth, stream
from trainchaos.recovery.transport.channel import Channel
from trainchaos.recovery.transport.stream import Message, MessageError
from trainchaos.recovery.transport.wire import Extra

KEEPER = b'{"be":"keeper"'
"""First field of a KeeperConfig, as JSON."""
TOPIC = "keeper"
PEERS_TOPIC = "peers"
PULSE_TOPIC = "pulse"
# bits of a version that count a keeper's notes; the bits above number the keeper
NOTES_BITS = 40
LOOK_S = 60.0
CLOSE_LIMIT_S = 5.0
MAX_CONNECTIONS = 512  # of ranks of its node, and as many of other keepers; more wait
IDLE_S = 10.0  # after which a connection of another keeper is closed
REQUEST_LIMIT_S = 10.0  # for one message to arrive whole, once it has begun


Answerer = Callable[[socket.socket, Any, int | None], Message | None]


class KeeperConfig(BaseModel):
    """Configuration of a keeper. ``parent``: pid that must be its parent; ``name``: of its socket
    in the abstract namespace, which leaves no file; ``token``: hexadecimal, of the run;
    ``limit_bytes``: of all it holds; ``keep``: complete checkpoints it keeps; ``replicate``:
    whether another node gets a copy; ``nodes``: of the job; ``number``: higher than that of any
    keeper the job had before; ``peers``: addresses of the other keepers; ``log``: where it logs
    refusals.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    be: Literal["keeper"] = "keeper"
    parent: int
    node: int
    nodes: int = 1
    number: int = Field(default=0, ge=0)
    job: str
    name: str
    token: str = Field(min_length=32)
    limit_bytes: int = Field(ge=1)
    keep: int = Field(default=KEPT, ge=1)
    replicate: bool = True
    host: str = "127.0.0.1"
    peers: dict[int, Address] = {}
    log: Path | None = None


class Keeper:
    """``port``: where other keepers reach it. Raises OSError when it cannot listen."""

    def __init__(self, config: KeeperConfig) -> None:
        self._config = config
        self._token = bytes.fromhex(config.token)
        self._store = KeeperStore(
            job=config.job,
            limit_bytes=config.limit_bytes,
            keep=config.keep,
            doubles=config.replicate and config.nodes > 1,
        )
        self._peers = Peers(config.node, self._token, config.peers)
        self._announcer = Announcer(self._peers, heard=self._hear, failed=self._miss)
        self._versions: dict[int, int] = {}
        self._version = config.number << NOTES_BITS
        self._lock = threading.Lock()
        ranks = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        ranks.bind("\0" + config.name)
        ranks.listen(MAX_CONNECTIONS)
        others = socket.create_server((config.host, 0), backlog=MAX_CONNECTIONS)
        self.port: int = others.getsockname()[1]
        self._listeners = {
            listener: threading.Thread(target=self._accept, args=(listener, serve), daemon=True)
            for listener, serve in ((ranks, self._serve_rank), (others, self._serve_peer))
        }
        for thread in self._listeners.values():
            thread.start()

    def know(self, addresses: dict[int, Address]) -> threading.Thread:
        """Take the current list of other keepers, some perhaps new: announce what is here, and give
        the successor what it lacks; the thread returned ends when that is done.
        """
        changed = self._peers.know(addresses)
        self._announcer.forget(changed)
        for node in changed:
            with self._lock:
                self._versions.pop(node, None)
            self._store.heard(node, ())
        thread = threading.Thread(target=self._copy_again, args=(changed,), daemon=True)
        thread.start()
        return thread

    def update(self, changes: dict[int, Address | None]) -> None:
        """As ``know``, with changes only; None: that keeper is gone."""
        known = {**self._peers.addresses, **changes}
        self.know({node: address for node, address in known.items() if address is not None})

    def close(self) -> None:
        """Stop listening; open connections continue. A thread that accepts holds its socket open
        until it has noticed.
        """
        self._announcer.close()
        for listener, thread in self._listeners.items():
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(CLOSE_LIMIT_S)

    # ---- connections

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        """Give each connection a thread of its own."""
        slots = threading.BoundedSemaphore(MAX_CONNECTIONS)

        def attend(sock: socket.socket) -> None:
            try:
                with sock:
                    serve(sock)
            except (OSError, MessageError) as error:
                self._say(f"a connection ended: {type(error).__name__}: {error}")
            finally:
                slots.release()

        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # closed
            while not slots.acquire(timeout=LOOK_S):
                pass
            threading.Thread(target=attend, args=(sock,), daemon=True).start()

    def _serve_rank(self, sock: socket.socket) -> None:
        if not protocol.same_user(sock):
            raise MessageError("a process of another user was turned away")
        # for as long as a rank trains between two requests
        self._serve(sock, self._answer_rank, math.inf)

    def _serve_peer(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        auth.admit(sock, self._token, **protocol.HELLO)
        self._serve(sock, self._answer_peer, IDLE_S)

    def _serve(self, sock: socket.socket, answer: Answerer, idle_s: float) -> None:
        while _begins(sock, idle_s):
            got = protocol.receive_ask(sock, limit_s=REQUEST_LIMIT_S)
            if got is None:
                return
            try:
                reply = answer(sock, *got)
            except Refusal as refusal:
                if isinstance(got[0], Offer | Put):
                    self._say(f"refused {got[0].header.key.label}: {refusal}")
                reply = Refused(reason=str(refusal))
            if reply is not None:
                stream.send(sock, reply)

    def _answer_rank(self, sock: socket.socket, ask: Any, fd: int | None) -> Message | None:
        if isinstance(ask, Offer) and fd is not None:
            return self._take(ask.header, fd)
        if fd is not None:
            os.close(fd)
        if isinstance(ask, Ask):
            held, lost = self._peers.ask_all(ask)
            return Held(nodes={self._config.node: self._store.held(), **held}, lost=lost)
        if isinstance(ask, Fetch):
            self._hand_over(sock, ask.key)
            return None
        if isinstance(ask, Forget):
            return self._forget(ask)
        raise MessageError(f"a rank may not send {type(ask).__name__}")

    def _answer_peer(self, sock: socket.socket, ask: Any, fd: int | None) -> Message | None:
        if isinstance(ask, Put):
            return self._take_copy(sock, ask)
        if isinstance(ask, Notes):
            for note in ask.notes:
                self._hear(note.node, note)
                # those may not know what this keeper knows already
                self._announcer.announce(note, note.on)
            return self._kept()
        if isinstance(ask, Ask):
            return Kept(held=self._store.held())
        if isinstance(ask, Forget):
            return Kept(held=self._store.forget(ask.step, ask.before))
        if isinstance(ask, Fetch):
            with self._store.lent(ask.key) as entry:
                if entry is None:
                    raise Refusal(f"{ask.key.label} is not here")
                stream.send(sock, Found(header=entry.header))
                protocol.send_file(sock, entry.fd, entry.header.bytes, limit_s=REQUEST_LIMIT_S)
            return None
        raise MessageError(f"a keeper may not send {type(ask).__name__}")

    # ---- what other keepers hold

    def _note(self) -> Note:
        """What is here now."""
        with self._lock:
            self._version += 1
            return Note(node=self._config.node, version=self._version, held=self._store.held())

    def _kept(self) -> Kept:
        note = self._note()
        return Kept(held=note.held, version=note.version)

    def _hear(self, node: int, said: Note | Kept) -> None:
        """Note what a keeper holds, unless a newer note is known."""
        with self._lock:
            if said.version <= self._versions.get(node, 0) or node == self._config.node:
                return
            self._versions[node] = said.version
            self._store.heard(node, said.held)

    def _miss(self, node: int, error: Exception) -> None:
        self._store.heard(node, ())
        self._say(f"node {node} does not answer: {error}")

    # ---- requests

    def _take(self, header: Header, fd: int) -> Kept:
        """Keep a part, and have it copied; answered when both are done."""
        self._store.add(header, fd, copy=False)
        copies, alone = self._copy(header.key)
        released = self._store.take_released(header.seat)
        return Kept(held=self._store.held(), released=released, copies=copies, alone=alone)

    def _copy(self, key: Key) -> tuple[tuple[int, ...], str]:
        """Send a copy to another node, and announce it; returns which nodes hold one, or why none
        does.
        """
        successor = self._successor()
        copies: tuple[int, ...] = ()
        alone = ""
        if successor is not None:
            with self._store.lent(key) as entry:
                try:
                    if entry is not None:
                        self._hear(successor, self._peers.put(successor, entry, self._note()))
                        copies = (successor,)
                except (OSError, MessageError) as error:
                    alone = f"node {successor}: {error}"
                    if isinstance(error, OSError):  # the keeper is gone, and what it held with it
                        self._store.heard(successor, ())
                    self._say(f"no copy of {key.label}: {alone}")
        others = [node for node in self._peers.ring() if node != successor]
        wait(self._announcer.announce(self._note(), others), ASK_LIMIT_S)
        return copies, alone

    def _successor(self) -> int | None:
        """The node that holds copies of this one's parts; None: there is no other, or no copies."""
        return next(iter(self._peers.ring() if self._config.replicate else ()), None)

    def _copy_again(self, changed: Sequence[int]) -> None:
        """``changed``: nodes whose keepers may know nothing yet, and cannot pass notes on."""
        note = self._note()
        new = [node for node in self._peers.ring() if node in changed and note.held]
        wait([self._announcer.tell(note, node) for node in new], ASK_LIMIT_S)
        successor = self._successor()
        if successor is None:
            return
        there = self._store.known_at(successor)
        for key in self._store.own():
            if key not in there:
                self._copy(key)

    def _forget(self, ask: Forget) -> Kept:
        """Release everywhere; a keeper that does not answer is lost, and so is what it held."""
        gone = set(self._store.forget(ask.step, ask.before))
        elsewhere, lost = self._peers.ask_all(ask)
        for node, why in lost.items():
            self._say(f"node {node} was not told what is doubtful: {why}")
        gone = gone.union(*elsewhere.values())
        return Kept(held=tuple(sorted(gone, key=lambda key: key.moment)))

    def _take_copy(self, sock: socket.socket, put: Put) -> Kept:
        self._hear(put.note.node, put.note)
        self._store.would_take(put.header)
        stream.send(sock, Kept())  # go on: now the data
        self._store.add(put.header, receive_part(sock, put.header).detach(), copy=True)
        return self._kept()

    def _hand_over(self, sock: socket.socket, key: Key) -> None:
        """Give a rank the descriptor of a part, of this node or fetched from another."""
        with self._store.lent(key) as entry:
            if entry is not None:
                stream.send(sock, Found(header=entry.header), [entry.fd])
                return
        reasons = []
        coming = partial(stream.send, sock, Coming())
        for node in self._peers.ring():
            try:
                header, memory = self._peers.fetch(node, key, progress=coming)
            except (OSError, MessageError) as error:
                reasons.append(f"node {node}: {error}")
                continue
            with closing(memory):
                stream.send(sock, Found(header=header), [memory.fd])
            return
        raise Refusal(f"nobody has {key.label}: " + "; ".join(reasons or ["no other keeper"]))

    def _say(self, text: str) -> None:
        say(text, who=f"keeper of node {self._config.node}")


def be_keeper(config: KeeperConfig, channel: Channel) -> NoReturn:
    """Run a keeper until the supervisor's side of ``channel`` closes; never returns."""
    die_with(config.parent)
    if config.log is not None:
        redirect_output(config.log)
    keeper = Keeper(config)
    channel.send(Extra(topic=TOPIC, payload={"port": keeper.port}))
    channel.sock.settimeout(LOOK_S)
    try:
        while (messages := channel.receive()) is not None:
            for message in messages:
                _obey(keeper, message, channel)
    except MessageError as error:
        say(str(error), who=f"keeper of node {config.node}")
    keeper.close()
    os._exit(0)


def _obey(keeper: Keeper, message: Any, channel: Channel) -> None:
    if isinstance(message, Extra) and message.topic == PULSE_TOPIC:
        channel.send(message)
    if isinstance(message, Extra) and message.topic == PEERS_TOPIC:
        peers = message.payload["peers"].items()
        keeper.update(
            {int(node): (str(at[0]), int(at[1])) if at is not None else None for node, at in peers}
        )


def _begins(sock: socket.socket, limit_s: float) -> bool:
    """Wait for the next request; False: none has begun within the limit."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while not poll.poll(1000 * min(limit_s, LOOK_S)):
        if limit_s <= LOOK_S:
            return False
    return True


def main() -> NoReturn:
    """See the module."""
    control_fd, config_fd = int(sys.argv[1]), int(sys.argv[3])
    with os.fdopen(config_fd, "rb") as stream:
        config = KeeperConfig.model_validate_json(stream.read())
    be_keeper(config, Channel(socket.socket(fileno=control_fd)))


if __name__ == "__main__":
    main()
