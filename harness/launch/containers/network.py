"""One network for the nodes of a run, with an address range that nothing else on this machine uses.

This module chooses the range, not the engine: the engine knows its own networks and the current
routes, but not the address translation that a killed engine has left behind, which would change the
sender of packets between nodes.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import shutil
import socket
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainchaos.chaos.errors import InfrastructureError
from trainchaos.harness.host.container_engine import asking

RULES_LIMIT_S = 5.0
TRIES = 8
_POOL = [ipaddress.ip_network(f"172.{second}.0.0/16") for second in range(18, 32)]
_BEFORE_NODES = 2  # the network's own address and the gateway's
_ROUTES = Path("/proc/net/route")
_RULES = ("iptables-legacy-save", "iptables-nft-save", "iptables-save")


@dataclass(frozen=True, kw_only=True)
class ContainerNetwork:
    """``gateway``: this machine's address in the network."""

    name: str
    id: str
    subnet: str
    gateway: str

    def address(self, node: int) -> str:
        """Address of a node, the same in all its lives."""
        return str(ipaddress.ip_network(self.subnet)[_BEFORE_NODES + node])


def make_network(
    client: Any,
    name: str,
    *,
    labels: Mapping[str, str],
    seed: str,
    nodes: int,
    subnet: str = "",
    outside: bool = False,
) -> ContainerNetwork:
    """Make the network. ``seed``: where the search for a free range starts, so that concurrent runs
    search in different places; ``subnet``: the user's choice; ``outside``: nodes can reach beyond
    this machine.

    Raises InfrastructureError if no range is free, or if this machine has no address in it.
    """
    taken = _taken(client)
    if subnet:
        _refuse_taken(subnet, taken, nodes)
    tries = [subnet] if subnet else free_subnets(taken, seed=seed, nodes=nodes)
    for wanted in tries:
        try:
            found = _make(client, name, wanted, labels, outside=outside)
        except InfrastructureError as error:
            if "overlap" in error.message.lower() and wanted != tries[-1]:
                continue  # another run took it after we looked
            raise
        _refuse_elsewhere(found)
        return found
    raise InfrastructureError(
        f"no range of {nodes} addresses is free in 172.18.0.0 to 172.31.255.255",
        hint=(
            "name one with the launcher's parameter subnet, or remove old networks: docker network"
            " prune"
        ),
    )


def free_subnets(taken: Collection[str], *, seed: str, nodes: int) -> list[str]:
    """The first few ranges with room for ``nodes`` that do not overlap a ``taken`` one; ``seed``
    sets the start of the search.
    """
    bits = max(8, (nodes + _BEFORE_NODES).bit_length())
    ranges = [str(net) for pool in _POOL for net in pool.subnets(new_prefix=32 - bits)]
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big") % len(ranges)
    used = [ipaddress.ip_network(text, strict=False) for text in taken]
    order = (ipaddress.ip_network(text) for text in ranges[start:] + ranges[:start])
    free = (str(net) for net in order if not any(net.overlaps(other) for other in used))
    return [found for found, _ in zip(free, range(TRIES), strict=False)]


def routed(table: str) -> list[str]:
    """Ranges with a route, from the text of /proc/net/route, without the default route."""
    found = []
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) > 7 and words[7] != "00000000":
            place, mask = (
                int.from_bytes(bytes.fromhex(word)[::-1], "big") for word in (words[1], words[7])
            )
            found.append(f"{ipaddress.ip_address(place)}/{mask.bit_count()}")
    return found


def translated(rules: str) -> list[str]:
    """Ranges named in address translation rules, from the output of iptables-save."""
    found = []
    for text in re.findall(r"(?:-s|-d|--to-destination) (\d+\.\d+\.\d+\.\d+(?:/\d+)?)", rules):
        net = ipaddress.ip_network(text, strict=False)
        if net.prefixlen > 0 and not net.is_loopback:
            found.append(str(net))
    return found


def _taken(client: Any) -> list[str]:
    with asking("list its networks"):
        configs = [c for net in client.networks.list() for c in net.attrs["IPAM"]["Config"] or []]
    found = [str(c["Subnet"]) for c in configs if ":" not in str(c.get("Subnet", ":"))]
    found += routed(_ROUTES.read_text()) if _ROUTES.exists() else []
    for command in _RULES:
        if shutil.which(command):
            # Only root may read them; others depend on the engine's own checks.
            ran = subprocess.run(
                [command, "-t", "nat"],
                capture_output=True,
                text=True,
                timeout=RULES_LIMIT_S,
                check=False,
            )
            found += translated(ran.stdout)
    return found


def _refuse_taken(subnet: str, taken: Collection[str], nodes: int) -> None:
    net = ipaddress.ip_network(subnet)
    if net.num_addresses < nodes + _BEFORE_NODES + 1:
        raise InfrastructureError(
            f"subnet {subnet} has no room for {nodes} nodes", hint="name a larger one, or none"
        )
    for other in taken:
        if net.overlaps(ipaddress.ip_network(other, strict=False)):
            raise InfrastructureError(
                f"subnet {subnet} is in use on this machine: a route, a network or address"
                f" translation has {other}",
                hint="name another one, or none to use a free one",
            )


def _make(
    client: Any, name: str, subnet: str, labels: Mapping[str, str], *, outside: bool
) -> ContainerNetwork:
    from docker.types import IPAMConfig, IPAMPool

    gateway = str(ipaddress.ip_network(subnet)[1])
    with asking(f"make the network {name} ({subnet})"):
        made = client.networks.create(
            name,
            driver="bridge",
            check_duplicate=True,
            labels=dict(labels),
            internal=not outside,
            ipam=IPAMConfig(pool_configs=[IPAMPool(subnet=subnet, gateway=gateway)]),
        )
    return ContainerNetwork(name=name, id=str(made.id), subnet=subnet, gateway=gateway)


def _refuse_elsewhere(network: ContainerNetwork) -> None:
    with socket.socket() as trial:
        try:
            trial.bind((network.gateway, 0))
        except OSError as error:
            raise InfrastructureError(
                f"the Docker engine's networks are not on this machine ({network.gateway} is not"
                " one of its addresses)",
                hint=(
                    "a rootless engine, Docker Desktop, or a harness that is itself in a container"
                    " cannot be used: run chaos where the engine runs"
                ),
            ) from error
