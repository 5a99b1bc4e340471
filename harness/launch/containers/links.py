"""Shapes packets between container nodes, in the kernel, and measures them; implements
``LinkControl``.

Links are named by nodes, in decimal. This module keeps the wanted shape of every link and derives
each node's rules from all of them, so a heal is just another wanted state and is safe to repeat.
Rules end with the container they are in and leave nothing on the machine, so they need no undo
records.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.launch.containers import rules
from trainchaos.harness.launch.containers.delay_helper import DelayHelper, queue_of
from trainchaos.harness.launch.containers.flapping import LinkFlapper
from trainchaos.harness.launch.containers.inside import Inside, lacks_tools
from trainchaos.harness.launch.containers.probes import AT_A_RATE, AT_ANY, Probes
from trainchaos.harness.launch.launcher import LinkControl

Link = tuple[str, str]
OPEN = LinkShape()
TRIAL_LIMIT_S = 10.0
USUAL_SEGMENTS = 65535
TRIALS = (
    (
        "rate limit by htb",
        "sch_htb",
        ("tc", "qdisc", "add", "dev", "lo", "root", "handle", "1:", "htb"),
        "",
    ),
    (
        "packet filter by nft",
        "nf_tables",
        ("nft", "-f", "-"),
        rules.table(rules.IngressRules(lost={"192.0.2.1": 0.5})),
    ),
)
BY_QUEUE = "a queue of packets in user space (this kernel has no netem)"


@dataclass(frozen=True, kw_only=True)
class NodeAddress:
    """A live node. ``life``: changes each time the node starts anew; ``open``: opens its
    namespace.
    """

    address: str
    life: int
    open: Callable[[], Inside]


@dataclass(kw_only=True)
class _Rules:
    """The rules in force in one life of one node."""

    place: NodeAddress
    inside: Inside
    device: str
    outward: Mapping[str, rules.EgressRules] = field(default_factory=dict)
    inward: rules.IngressRules = field(default_factory=rules.IngressRules)
    numbers: dict[str, int] = field(default_factory=dict)
    delayers: dict[str, DelayHelper] = field(default_factory=dict)
    single: bool = False
    chained: bool = False


class NodeLinks(LinkControl):
    """``place_of``: a node's address, None if the node is not alive. All calls are bounded in time
    and safe from several threads.
    """

    def __init__(
        self, place_of: Callable[[int], NodeAddress | None], address_of: Callable[[int], str]
    ) -> None:
        self._place_of = place_of
        self._address_of = address_of
        self._shapes: dict[Link, LinkShape] = {}
        self._isolated: dict[int, tuple[bool, bool]] = {}
        self._in_force: dict[int, _Rules] = {}
        self._lock = threading.RLock()
        self._netem: bool | None = None
        self._flaps = LinkFlapper(self._turned)
        self._probes = Probes(self._reachable)

    # ---- LinkControl

    def refuses(self, link: Link) -> str | None:
        """Why a link cannot be shaped: a node has no network to itself."""
        return (
            f"both ends are on node {link[0]}: nothing between them to be shaped"
            if link[0] == link[1]
            else None
        )

    def shape(self, links: Sequence[Link], shape: LinkShape) -> str:
        """Shape the links; in force when this returns. Raises RuntimeError."""
        with self._lock:
            for link in links:
                (
                    self._shapes.pop(link, None)
                    if shape == OPEN
                    else self._shapes.update({link: shape})
                )
                self._flaps.set(link, shape)
            for node in dict.fromkeys(int(end) for link in links for end in link):
                self._lead(node, must=shape != OPEN)
            return self._means(shape)

    def probe(self, link: Link) -> int:
        """Start to measure a link, on a separate thread."""
        limited = self._shapes.get(link, OPEN).bytes_per_s is not None
        return self._probes.begin((int(link[0]), int(link[1])), AT_A_RATE if limited else AT_ANY)

    def probed(self, number: int) -> Mapping[str, Any] | None:
        """``round_trip_s`` of an uninvolved client, and ``mbit_per_s`` of all traffic that arrives
        from the source while the client sends at full rate.
        """
        return self._probes.result(number)

    # ---- whole nodes

    def isolate(self, node: int, *, outward: bool, inward: bool) -> None:
        """Drop everything out of it, or into it. Raises RuntimeError."""
        with self._lock:
            self._isolated[node] = (outward, inward)
            self._lead(node, must=True)

    def rejoin(self, node: int) -> None:
        """Undo ``isolate``."""
        with self._lock:
            self._isolated.pop(node, None)
            self._lead(node, must=False)

    def renewed(self, node: int) -> None:
        """The node started anew, without rules: apply the shapes of its links again."""
        with self._lock:
            self._forget(node)
            with contextlib.suppress(RuntimeError):  # gone again: its next renewal calls this
                self._lead(node, must=False)

    def close(self) -> None:
        """End helpers and release namespaces. Rules end with the nodes."""
        self._flaps.close()
        self._probes.close()
        with self._lock:
            for node in list(self._in_force):
                self._forget(node)

    # ---- bringing a node to its wanted state

    def _lead(self, node: int, *, must: bool) -> None:
        """Bring a node's rules to the wanted state. ``must``: raise if the node is gone or ends
        meanwhile.
        """
        try:
            self._lead_on(node, must=must)
        except RuntimeError:
            if must or self._place_of(node) is not None:
                raise
            self._forget(node)

    def _lead_on(self, node: int, *, must: bool) -> None:
        inward, outward, late = self._inward(node), self._outward(node), self._late(node)
        if (
            node not in self._in_force
            and not must
            and not outward
            and not late
            and inward == rules.IngressRules()
        ):
            return
        found = self._standing(node)
        if found is None:
            if must:
                raise RuntimeError(f"node {node} is not there now")
            return
        inside = found.inside
        for address in [*inward.blocked, *inward.lost, *outward]:
            found.numbers.setdefault(address, len(found.numbers) + 1)
        self._segment(
            found, single=any(s.loss for (src, _), s in self._shapes.items() if int(src) == node)
        )
        said = rules.device(found.device, found.outward, outward, found.numbers)
        if said:
            inside.run(["tc", "-batch", "-"], "\n".join(said) + "\n")
            found.outward = outward
        if inward != found.inward:
            inside.run(["nft", "-f", "-"], rules.table(inward))
            found.inward = inward
        self._hold(found, late)

    def _reachable(self, node: int) -> tuple[Inside, str] | None:
        known = self._standing(node)
        return None if known is None else (known.inside, known.place.address)

    def _standing(self, node: int) -> _Rules | None:
        """The node's rules in its present life, None if it is not alive."""
        with self._lock:
            place, known = self._place_of(node), self._in_force.get(node)
            if known is not None and (place is None or place.life != known.place.life):
                self._forget(node)
                known = None
            if place is not None and known is None:
                inside = place.open()
                known = _Rules(place=place, inside=inside, device=_device(inside, place.address))
                self._in_force[node] = known
            return known

    def _forget(self, node: int) -> None:
        known = self._in_force.pop(node, None)
        if known is not None:
            for address in list(known.delayers):
                known.delayers.pop(address).end()
            known.inside.close()

    def _arriving(self, node: int) -> Iterator[tuple[str, LinkShape]]:
        """(address of the source, shape) of each shaped link to a node."""
        for (src, dst), shape in self._shapes.items():
            if int(dst) == node:
                yield self._address_of(int(src)), shape

    def _inward(self, node: int) -> rules.IngressRules:
        blocked = {a for a, shape in self._arriving(node) if shape.blocked}
        down = {self._address_of(int(src)) for src, dst in self._flaps.down() if int(dst) == node}
        out, into = self._isolated.get(node, (False, False))
        return rules.IngressRules(
            blocked=frozenset(blocked | down),
            nothing_in=into,
            nothing_out=out,
            lost={address: shape.loss for address, shape in self._arriving(node) if shape.loss},
        )

    def _late(self, node: int) -> dict[str, LinkShape]:
        if self.has_netem():
            return {}
        return {address: s for address, s in self._arriving(node) if s.delay_s or s.jitter_s}

    def _outward(self, node: int) -> dict[str, rules.EgressRules]:
        found = {}
        for (src, dst), shape in self._shapes.items():
            late = self.has_netem() and (shape.delay_s > 0 or shape.jitter_s > 0)
            if int(src) == node and (shape.bytes_per_s is not None or late):
                found[self._address_of(int(dst))] = rules.EgressRules(
                    bytes_per_s=shape.bytes_per_s,
                    delay_s=shape.delay_s if late else 0.0,
                    jitter_s=shape.jitter_s if late else 0.0,
                )
        return found

    def _segment(self, found: _Rules, *, single: bool) -> None:
        """While a link loses packets, send one segment per packet, so that one loss is one segment;
        this also applies to existing connections.
        """
        if single != found.single:
            most = "1" if single else str(USUAL_SEGMENTS)
            found.inside.run(["ip", "link", "set", "dev", found.device, "gso_max_segs", most])
            found.single = single

    def _hold(self, found: _Rules, late: Mapping[str, LinkShape]) -> None:
        """Let helpers delay packets. Start a helper before packets are led to it, and end
        it after.
        """
        if late.keys() != found.delayers.keys():
            for address in late.keys() - found.delayers.keys():
                found.delayers[address] = DelayHelper(found.inside, address)
        for address, shape in late.items():
            found.delayers[address].delay(shape)
        if late or found.chained:
            found.inside.run(
                ["iptables-restore", "--noflush"], rules.queues({a: queue_of(a) for a in late})
            )
            if not found.chained:
                found.inside.run(["iptables", "-t", "mangle", "-I", "INPUT", "-j", rules.CHAIN])
                found.chained = True
        for address in found.delayers.keys() - late.keys():
            found.delayers.pop(address).end()

    def has_netem(self) -> bool:
        """Whether the kernel can delay packets itself; tried once, in a temporary namespace."""
        if self._netem is None:
            self._netem = kernel_has_netem()
        return self._netem

    def _turned(self, links: Sequence[Link]) -> None:
        """Flapping links went down or came up."""
        with self._lock:
            for node in dict.fromkeys(int(dst) for _, dst in links):
                with contextlib.suppress(RuntimeError):  # its node is gone: the next change retries
                    self._lead(node, must=False)

    def _means(self, shape: LinkShape) -> str:
        late = "netem" if self._netem else BY_QUEUE
        used = {
            "htb": shape.bytes_per_s is not None,
            late: shape.delay_s > 0 or shape.jitter_s > 0,
            "nft drop of single segments": shape.loss > 0,
            "nft drop": shape.blocked,
            "nft drop in turn": shape.down_s > 0,
        }
        return ", ".join(means for means, wanted in used.items() if wanted) or "nothing"


def lacks_links() -> str | None:
    """Why packets between nodes cannot be shaped here now, with a hint; None if they can.

    Tried in temporary network namespaces if this user may make them; otherwise only the nodes can
    show it.
    """
    if (missing := lacks_tools()) is not None or os.geteuid() != 0:
        return missing
    for name, module, argv, text in TRIALS:
        said = refused(argv, text)
        if said:
            return (
                f"this kernel offers no {name} ({said}): modprobe {module}, or use launcher local"
                " with its proxy"
            )
    return None


def kernel_has_netem() -> bool:
    """Tried in a temporary network namespace; False where that is not allowed."""
    return not refused(["tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"], "")


def refused(argv: Sequence[str], text: str) -> str:
    """Error message of a command in a temporary network namespace; "" if it works there."""
    try:
        ran = subprocess.run(
            ["unshare", "--net", *argv],
            input=text,
            text=True,
            capture_output=True,
            timeout=TRIAL_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (ran.stderr.strip().splitlines() or ["no reason given"])[0] if ran.returncode else ""


def _device(inside: Inside, address: str) -> str:
    """The node's device that has the address; after a reconnection its name may differ."""
    for line in inside.run(["ip", "-o", "-4", "addr", "show"]).splitlines():
        words = line.split()
        if len(words) > 3 and words[3].split("/")[0] == address:
            return words[1]
    raise RuntimeError(f"no network device of the node has its address {address}")
