"""What tc, nft and iptables are told for links between containers, and when; the kernel's answers
are elsewhere.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.running import LIMIT_S
from trainchaos.chaos.fault.base import Need
from trainchaos.chaos.fault.targets import LinkShape
from trainchaos.harness.launch.containers import links
from trainchaos.harness.launch.containers.flapping import LinkFlapper
from trainchaos.harness.launch.containers.inside import ByEngine
from trainchaos.harness.launch.containers.links import NodeAddress, NodeLinks
from trainchaos.harness.launch.containers.probes import AT_A_RATE, rate_of
from trainchaos.harness.launchers.docker import Docker

OPEN = LinkShape()


class FakeInside:
    """Keeps what it was told; refuses the commands of ``refuses``."""

    entered = True
    python = "python"

    def __init__(self, node: int) -> None:
        self.node = node
        self.told: list[tuple[str, str]] = []
        self.refuses: set[str] = set()
        self.closed = 0
        self.dies: Callable[[], None] = lambda: None

    def run(self, argv: Sequence[str], text: str = "", *, limit_s: float = 1.0) -> str:
        if argv[0] in self.refuses:
            self.dies()
            raise RuntimeError(f"{argv[0]} refused: Operation not permitted")
        if argv[:2] == ["ip", "-o"]:
            return (
                f"1: lo    inet 127.0.0.1/8 scope host lo\n9: eth1    inet 10.0.0.{self.node}/24"
                " scope global eth1"
            )
        self.told.append((" ".join(argv), text))
        return ""

    def stay(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        raise AssertionError(argv)

    def close(self) -> None:
        self.closed += 1


class Rig:
    """Three nodes 1 to 3 at 10.0.0.N, on a kernel with netem."""

    def __init__(self, *, netem: bool = True) -> None:
        self.insides = {node: FakeInside(node) for node in (1, 2, 3)}
        self.lives = dict.fromkeys(self.insides, 1)
        self.links = NodeLinks(self._place, lambda node: f"10.0.0.{node}")
        self.links._netem = netem

    def _place(self, node: int) -> NodeAddress | None:
        if not self.lives[node]:
            return None
        return NodeAddress(
            address=f"10.0.0.{node}", life=self.lives[node], open=lambda: self.insides[node]
        )

    def told(self, node: int) -> list[str]:
        """Commands and what they were fed with, since the last call."""
        said = [f"{command}\n{text}" for command, text in self.insides[node].told]
        self.insides[node].told.clear()
        return said


def test_a_rate_is_a_class_at_the_source_and_goes_with_the_heal() -> None:
    rig = Rig()
    assert rig.links.shape([("1", "2")], LinkShape(bytes_per_s=12_500_000)) == "htb"
    (said,) = rig.told(1)
    assert "qdisc add dev eth1 root handle 1: htb" in said and "rate 100000000bit" in said
    assert "match ip dst 10.0.0.2/32" in said and rig.told(2) == []
    rig.links.shape([("1", "3")], LinkShape(bytes_per_s=1_250_000))
    (said,) = rig.told(1)
    assert "qdisc add" not in said and "classid 1:1 " not in said, (
        "the class that stays is not touched"
    )
    rig.links.shape([("1", "2")], OPEN)
    (said,) = rig.told(1)
    assert (
        "filter del dev eth1 parent 1: protocol ip prio 1" in said
        and "class del dev eth1 classid 1:1" in said
    )
    for _ in range(2):
        rig.links.shape([("1", "3")], OPEN)
    assert rig.told(1) == ["tc -batch -\nqdisc del dev eth1 root\n"], (
        "the second heal has nothing to do"
    )


def test_what_is_blocked_or_lost_is_dropped_where_it_arrives() -> None:
    rig = Rig()
    assert rig.links.shape([("1", "2")], LinkShape(blocked=True)) == "nft drop"
    (said,) = rig.told(2)
    assert "ip saddr 10.0.0.1 drop" in said and rig.told(1) == [], "the other way is open"
    assert rig.links.shape([("3", "2")], LinkShape(loss=0.02)) == "nft drop of single segments"
    (said,) = rig.told(2)
    assert (
        "ip saddr 10.0.0.1 drop" in said
        and "ip saddr 10.0.0.3 numgen random mod 100000 < 2000 drop" in said
    )
    assert rig.told(3) == ["ip link set dev eth1 gso_max_segs 1\n"]
    for _ in range(2):
        rig.links.shape([("1", "2"), ("3", "2")], OPEN)
    assert rig.told(2) == ["nft -f -\ntable ip trainchaos {}\ndelete table ip trainchaos\n"]
    assert rig.told(3) == ["ip link set dev eth1 gso_max_segs 65535\n"]


def test_a_delay_is_netems_where_the_kernel_has_it() -> None:
    rig = Rig()
    assert rig.links.shape([("1", "2")], LinkShape(delay_s=0.05, jitter_s=0.01)) == "netem"
    (said,) = rig.told(1)
    assert "netem delay 50000us 10000us" in said


def test_without_netem_a_delay_needs_a_helper_that_the_engine_cannot_keep() -> None:
    rig = Rig(netem=False)
    with pytest.raises(AssertionError, match=r"harness\.launch\.containers\.delaying"):
        rig.links.shape([("1", "2")], LinkShape(delay_s=0.05))


def test_an_isolated_node_hears_and_says_nothing_but_to_itself() -> None:
    rig = Rig()
    rig.links.isolate(2, outward=True, inward=False)
    (said,) = rig.told(2)
    into, outof = said.split("chain outof")
    assert "drop" not in into and '"lo" accept\n  drop' in outof
    rig.links.rejoin(2)
    rig.links.rejoin(2)
    assert len(rig.told(2)) == 1


def test_a_node_that_began_anew_gets_what_holds_for_its_links() -> None:
    rig = Rig()
    rig.links.shape([("1", "2"), ("2", "1")], LinkShape(blocked=True))
    rig.told(2)
    rig.lives[2] = 2
    rig.links.renewed(2)
    (said,) = rig.told(2)
    assert "ip saddr 10.0.0.1 drop" in said and rig.insides[2].closed == 1


def test_another_life_of_a_node_has_no_rules_though_nobody_said_so() -> None:
    rig = Rig()
    rig.links.shape([("1", "2")], LinkShape(blocked=True))
    rig.told(2)
    rig.lives[2] = 2
    rig.links.shape([("1", "2")], LinkShape(blocked=True))
    assert "ip saddr 10.0.0.1 drop" in rig.told(2)[0]


def test_a_node_that_is_gone_cannot_be_shaped_but_healed() -> None:
    rig = Rig()
    rig.links.shape([("1", "2")], LinkShape(blocked=True))
    rig.lives[2] = 0
    with pytest.raises(RuntimeError, match="node 2 is not there now"):
        rig.links.shape([("1", "2")], LinkShape(blocked=True, loss=0.1))
    rig.links.shape([("1", "2")], OPEN)
    rig.links.renewed(2)


def test_a_node_that_goes_while_it_is_healed_is_healed() -> None:
    rig = Rig()
    rig.links.shape([("1", "2")], LinkShape(blocked=True))
    rig.insides[2].refuses.add("nft")
    with pytest.raises(RuntimeError, match="nft refused"):
        rig.links.shape([("1", "2")], OPEN)
    rig.insides[2].dies = lambda: rig.lives.update({2: 0})
    rig.links.shape([("1", "2")], OPEN)
    assert rig.insides[2].closed == 1


def test_an_image_without_the_tools_is_said() -> None:
    def exec_run(argv: Sequence[str], **how: Any) -> tuple[int, tuple[bytes, None]]:
        return 126, (b"OCI runtime exec failed: executable file not found", None)

    with pytest.raises(RuntimeError, match="nft is not in the image of n1: it needs tc, nft, ip"):
        ByEngine(SimpleNamespace(name="n1", exec_run=exec_run), "python").run(
            ["nft", "-f", "-"], "text"
        )


def test_a_refusal_says_who_refused_and_a_second_try_is_made_anew() -> None:
    rig = Rig()
    rig.insides[2].refuses.add("nft")
    with pytest.raises(RuntimeError, match="nft refused: Operation not permitted"):
        rig.links.shape([("1", "2")], LinkShape(blocked=True))
    rig.insides[2].refuses.clear()
    rig.links.shape([("1", "2")], LinkShape(blocked=True))
    assert "drop" in rig.told(2)[0]


def test_a_link_within_a_node_is_refused() -> None:
    assert "both ends are on node 1" in str(Rig().links.refuses(("1", "1")))
    assert Rig().links.refuses(("1", "2")) is None


def test_a_flapping_link_begins_down_and_comes_up() -> None:
    turns: list[list[tuple[str, str]]] = []
    up = threading.Event()

    def turned(changed: Any) -> None:
        turns.append(flaps.down())
        if len(turns) >= 3:
            up.set()

    flaps = LinkFlapper(turned)
    flaps.set(("1", "2"), LinkShape(down_s=0.02, up_s=0.02))
    assert flaps.down() == [("1", "2")]
    assert up.wait(LIMIT_S)
    flaps.set(("1", "2"), OPEN)
    assert flaps.down() == []
    flaps.close()
    assert turns[:3] == [[], [("1", "2")], []]


@pytest.mark.parametrize(
    ("samples", "rate"),
    [
        ([], None),
        ([(0.0, 5)], None),
        ([(0.0, 5), (1.0, 5)], None),
        ([(at / 20, 0 if at < 4 else at * 50_000) for at in range(40)], 8.0),
        ([(at / 20, 10**9 if at > 3 else 0) for at in range(40)], 0.0),
        ([(at / 20, at * 50_000) for at in range(10)], None),
    ],
)
def test_a_rate_is_of_a_window_after_the_first_rush(
    samples: list[tuple[float, int]], rate: float | None
) -> None:
    assert rate_of(samples, AT_A_RATE) == (None if rate is None else pytest.approx(rate))


def test_a_kernel_without_what_links_need_is_said_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "lacks_tools", lambda: None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(
        links, "refused", lambda argv, text: "unknown qdisc" if argv[0] == "tc" else ""
    )
    said = links.lacks_links()
    assert said is not None and "no rate limit by htb (unknown qdisc): modprobe sch_htb" in said
    monkeypatch.setattr(links, "refused", lambda argv, text: "")
    assert links.lacks_links() is None
    monkeypatch.setattr(
        links, "lacks_tools", lambda: "nft not installed here: apt-get install nftables"
    )
    assert (
        "apt-get install" in str(Docker().lacks(Need.LINKS)) and Docker().lacks(Need.NODES) is None
    )
