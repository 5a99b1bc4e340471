"""One network for the nodes of a run, with a range of addresses that nothing else on this machine
uses.

Chosen here and not by the engine: it knows its own networks and the routes there are now, but not
the address translation that an engine which was killed has left behind: under that, packets between
nodes change their sender.
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

from chaos.errors import InfrastructureError
from harness.host.container_engine import asking

RULES_LIMIT_S = 5.0
TRIES = 8
_POOL = [ipaddress.ip_network(f"172.{second}.0.0/16") for second in range(18, 32)]
_BEFORE_NODES = 2  # the network's own address and the gateway's
_ROUTES = Path("/proc/net/route")
_RULES = ("iptables-legacy-save", "iptables-nft-save", "iptables-save")


@dataclass(frozen=True, kw_only=True)
class ContainerNetwork:
    """``gateway``: this machine's address in it."""

    name: str
    id: str
    subnet: str
    gateway: str

    def address(self, node: int) -> str:
        """Of a node, the same in all its lives."""
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
    """Make it. ``seed``: where to begin to look for free addresses, so that runs at the same time
    look elsewhere; ``subnet``: wanted by the user; ``outside``: nodes reach what is beyond this
    machine.

    Raises InfrastructureError when there is none, and when this machine has no address in it.
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
                continue  # another run took it since we looked
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
    """The first few ranges with room for ``nodes`` that touch none that is ``taken``; ``seed`` says
    where to begin.
    """
    bits = max(8, (nodes + _BEFORE_NODES).bit_length())
    ranges = [str(net) for pool in _POOL for net in pool.subnets(new_prefix=32 - bits)]
    start = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "big") % len(ranges)
    used = [ipaddress.ip_network(text, strict=False) for text in taken]
    order = (ipaddress.ip_network(text) for text in ranges[start:] + ranges[:start])
    free = (str(net) for net in order if not any(net.overlaps(other) for other in used))
    return [found for found, _ in zip(free, range(TRIES), strict=False)]


def routed(table: str) -> list[str]:
    """Ranges with a route, from the text of /proc/net/route; the default route is none."""
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
    """Ranges that rules of address translation name, from what iptables-save prints."""
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
            # Only root may read them; for others the engine's own care has to do.
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
                hint="name another one, or none: then a free one is looked for",
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
                f"the Docker engine's networks are not on this machine ({network.gateway} is no"
                " address of it)",
                hint=(
                    "a rootless engine, Docker Desktop, or a harness that is itself in a container"
                    " cannot be used: run chaos where the engine runs"
                ),
            ) from error
