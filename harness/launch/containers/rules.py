"""Rules for tc, nft and iptables that delay, slow or drop packets between nodes. Pure.

Rates apply at the sender's device, by destination (htb). Lost packets are dropped at the receiver,
by source (nft), so that the sender sees what a bad cable would show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TABLE = "trainchaos"
COUNTS = "trainchaos_count"
CHAIN = "TRAINCHAOS"
LEAST_BURST = 16 << 10
QUEUE_S = 0.05  # seconds of bytes that may wait at a limited device
LEAST_QUEUE = 256 << 10
UNLIMITED = 12_500_000_000  # bytes per second, for a class that only delays
_LOSS_STEPS = 100_000


@dataclass(frozen=True, kw_only=True)
class EgressRules:
    """Shape of a node's packets to one address at its device: a rate, and with netem a delay."""

    bytes_per_s: float | None = None
    delay_s: float = 0.0
    jitter_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class IngressRules:
    """Rules for packets arriving from given addresses. ``lost``: address -> share; ``late``:
    address -> number of the queue that holds them.
    """

    blocked: frozenset[str] = frozenset()
    lost: Mapping[str, float] = field(default_factory=dict)
    late: Mapping[str, int] = field(default_factory=dict)
    nothing_in: bool = False
    nothing_out: bool = False


def table(rules: IngressRules) -> str:
    """Input for ``nft -f -``: replaces all our rules at once."""
    into = ["  drop"] if rules.nothing_in else []
    into += [f"  ip saddr {address} drop" for address in sorted(rules.blocked)]
    for address, share in sorted(rules.lost.items()):
        into.append(
            f"  ip saddr {address} numgen random mod {_LOSS_STEPS} < {round(share * _LOSS_STEPS)}"
            " drop"
        )
    outof = ["  drop"] if rules.nothing_out else []
    whole = [f"table ip {TABLE} {{}}", f"delete table ip {TABLE}"]
    if into or outof:
        whole += [
            f"table ip {TABLE} {{",
            " chain into {",
            "  type filter hook input priority -200; policy accept;",
            '  iifname "lo" accept',
            *into,
            " }",
            " chain outof {",
            "  type filter hook output priority -200; policy accept;",
            '  oifname "lo" accept',
            *outof,
            " }",
            "}",
        ]
    return "\n".join(whole) + "\n"


def queues(late: Mapping[str, int]) -> str:
    """Input for ``iptables-restore --noflush``: replaces our chain. Packets pass if a queue has no
    helper.
    """
    held = [
        f"-A {CHAIN} -s {address}/32 -j NFQUEUE --queue-num {number} --queue-bypass"
        for address, number in sorted(late.items())
    ]
    return "\n".join(["*mangle", f":{CHAIN} - [0:0]", *held, "COMMIT"]) + "\n"


def counting(address: str) -> str:
    """Input for ``nft -f -``: counts packets from an address, before any of them are
    dropped here.
    """
    return (
        f"table ip {COUNTS} {{}}\ndelete table ip {COUNTS}\ntable ip {COUNTS} {{\n counter seen"
        f" {{}}\n chain seen {{\n  type filter hook prerouting priority -400;\n  ip saddr {address}"
        " counter name seen\n }\n}\n"
    )


def device(
    name: str,
    before: Mapping[str, EgressRules],
    after: Mapping[str, EgressRules],
    numbers: Mapping[str, int],
) -> Sequence[str]:
    """Input for ``tc -batch -``: moves the device from one state to another; unchanged parts stay.

    ``numbers``: class number of each address, from 1.
    """
    if not after:
        return [f"qdisc del dev {name} root"] if before else []
    said = [] if before else [f"qdisc add dev {name} root handle 1: htb default 0"]
    for address in sorted(before.keys() - after.keys()):
        number = numbers[address]
        said += [
            f"filter del dev {name} parent 1: protocol ip prio {number}",
            f"class del dev {name} classid 1:{number:x}",
        ]
    for address, wanted in sorted(after.items()):
        if before.get(address) != wanted:
            said += _class(name, address, wanted, numbers[address], new=address not in before)
    return said


def _class(name: str, address: str, wanted: EgressRules, number: int, *, new: bool) -> list[str]:
    rate = wanted.bytes_per_s or UNLIMITED
    bits = max(8, int(rate * 8))
    burst = max(LEAST_BURST, int(rate * 0.001))
    size = max(LEAST_QUEUE, int(rate * QUEUE_S))
    leaf = f"qdisc replace dev {name} parent 1:{number:x} handle {number + 16:x}: "
    if wanted.delay_s or wanted.jitter_s:
        leaf += (
            f"netem delay {wanted.delay_s * 1e6:.0f}us {wanted.jitter_s * 1e6:.0f}us limit 100000"
        )
    else:
        leaf += f"bfifo limit {size}"
    said = [
        (
            f"class replace dev {name} parent 1: classid 1:{number:x} htb rate {bits}bit ceil"
            f" {bits}bit burst {burst}b cburst {burst}b"
        ),
        leaf,
    ]
    if new:
        said.append(
            f"filter add dev {name} parent 1: protocol ip prio {number} u32 match ip dst"
            f" {address}/32 flowid 1:{number:x}"
        )
    return said
