"""What NCCL's RAS is asked, what its answers say, and what is done with answers of another form."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.fakes.ras_server import (
    FIRST_PID,
    communicator,
    document,
    missing,
    rank,
    ras_server,
)
from tests.support.running import LIMIT_S
from trainchaos.recovery.detection import ras
from trainchaos.recovery.detection.ras import TRIES, RasError, RasFinding, ask, read_json
from trainchaos.recovery.process.local import RAS_ADDRESS, rank_environment, ras_address

WELL = document(communicator([rank(0), rank(1)]))
LAGS = document(communicator([rank(0), rank(1), rank(2, 40)]))
SILENT = document(communicator([rank(0), rank(1)], [missing(2)]))
DEAD = document(communicator([rank(0), rank(1)], [missing(2, dead=True)]))
GPU = torch.cuda.is_available() and dist.is_nccl_available()


# ---- asking


def test_a_server_is_asked_by_its_protocol() -> None:
    with ras_server(LAGS) as server:
        found = ask(server.address)
    assert server.heard == [["CLIENT PROTOCOL 2", "TIMEOUT 3", "SET FORMAT json", "VERBOSE STATUS"]]
    assert found == read_json(LAGS) and found.communicators == 1


def test_a_stopped_process_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras, "GREET_S", 0.02)
    with ras_server(WELL, mute=2) as server:
        assert ask(server.address, limit_s=LIMIT_S).sentences == []
        assert len(server.heard) == 3


def test_where_nobody_answers_it_is_not_asked_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras, "GREET_S", 0.02)
    with ras_server(mute=99) as server, pytest.raises(RasError, match="no process answers"):
        ask(server.address, limit_s=LIMIT_S)
    assert len(server.heard) == TRIES
    with ras_server(mute=99) as server, pytest.raises(RasError, match=r"no process|timed out"):
        ask(server.address, limit_s=0.03)


def test_where_nobody_listens() -> None:
    with pytest.raises(RasError, match="Connection refused"):
        ask(ras_address())


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ({"knows": False}, "refuses 'SET FORMAT json'.*\n.*NCCL 2.28.7 and newer"),
        ({"first": "SSH-2.0-OpenSSH_9.6\n"}, "is not NCCL's RAS"),
        ({"first": "x" * 5000}, "is not NCCL's RAS"),
        ({"answer": ""}, "no answer of NCCL's RAS"),
        ({"answer": WELL[:300]}, "no answer of NCCL's RAS"),
        ({"answer": "\0\xff garbage"}, "no answer of NCCL's RAS"),
    ],
)
def test_other_answers_are_refused(server: dict[str, Any], why: str) -> None:
    with ras_server(**server) as one, pytest.raises(RasError, match=why):
        ask(one.address, limit_s=LIMIT_S)


def test_a_huge_answer_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras, "MOST_BYTES", 1 << 20)
    with ras_server("[" * (8 << 20)) as server, pytest.raises(RasError, match="longer than"):
        ask(server.address, limit_s=LIMIT_S)


@pytest.mark.parametrize("address", ["", "28028", "host:", "host:x", "host:0", "host:99999"])
def test_no_address(address: str) -> None:
    with pytest.raises(RasError, match="no address"):
        ask(address)


# ---- what an answer says


def test_a_job_that_is_well() -> None:
    found = read_json(WELL)
    assert (found.sentences, found.culprit, found.unsure) == ([], None, False)


def test_who_lags() -> None:
    found = read_json(LAGS)
    (one,) = found.behind
    assert (one.rank, one.pid, one.collective) == (2, FIRST_PID + 2, "AllReduce")
    assert (one.count, one.others, one.awaited) == (40, 41, "AllReduce 41")
    assert found.sentences == [
        "rank 2 (process 4242 on 10.0.0.1) lags: it has launched AllReduce 40 times, others 41, in"
        " communicator 0x27a079b828ff1a75"
    ]
    assert found.culprit == FIRST_PID + 2 and found.about(FIRST_PID + 2) == (one,)
    assert found.of({FIRST_PID: "w0"}).sentences == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (SILENT, "does not answer NCCL's RAS"),
        (DEAD, "is considered dead (unreachable via the RAS network)"),
    ],
)
def test_who_is_gone(answer: str, said: str) -> None:
    found = read_json(answer)
    assert found.sentences == [f"rank 2 (process 4242 on 10.0.0.1) {said}"]
    assert found.culprit == FIRST_PID + 2


def test_who_is_missing_is_the_cause_and_who_lags_the_effect() -> None:
    found = read_json(document(communicator([rank(0), rank(1, 40)], [missing(2)])))
    assert len(found.sentences) == 2 and found.culprit == FIRST_PID + 2


@pytest.mark.parametrize(
    "answer",
    [
        document(communicator([rank(0), rank(1, 40), rank(2, 40)])),
        document(communicator([rank(0)], [missing(1), missing(2)])),
        # it may be kept by one with which it exchanges alone
        document(communicator([rank(0), rank(1, 40)]), communicator([rank(0, 7, Send=3)])),
    ],
)
def test_nobody_is_blamed_where_it_cannot_be_told(answer: str) -> None:
    found = read_json(answer)
    assert found.culprit is None and (found.sentences or found.unsure)


@pytest.mark.parametrize("flag", ["abort_flag", "destroy_flag", "finalize_called"])
def test_counts_of_a_communicator_that_is_left_say_nothing(flag: str) -> None:
    answer = document(communicator([rank(0, **{flag: True}), rank(1, 40)]))
    assert read_json(answer).sentences == []


def test_who_answers_but_has_left_the_communicator_is_not_missing() -> None:
    answer = document(communicator([rank(0)], [missing(1, unresponsive=False)]))
    assert read_json(answer) == RasFinding(communicators=1)


def test_one_process_is_told_of_once() -> None:
    pair = communicator([rank(0)], [missing(1)])
    whole = communicator([rank(0), rank(1)], [{**missing(3), "pid": FIRST_PID + 1}])
    (one,) = read_json(document(pair, whole)).missing
    assert one.rank == 3, "its rank in the largest"


def test_a_process_that_ras_does_not_know() -> None:
    gone = {**missing(2), "pid": -1, "host": "unknown"}
    found = read_json(document(communicator([rank(0)], [gone])))
    assert found.sentences == ["rank 2 (of an unknown process) does not answer NCCL's RAS"]
    assert found.culprit is None


def changed(change: Callable[[dict[str, Any]], object]) -> str:
    found = json.loads(LAGS)
    change(found["communicators"][0]["ranks"][0])
    return json.dumps(found)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"nccl_version": "2.28.9", "communicators": {}}',
        changed(lambda one: one.update(pid="4240")),
        changed(lambda one: one.update(pid=True)),
        changed(lambda one: one.update(rank=-1)),
        changed(lambda one: one.update(host="\x1b[31m")),
        changed(lambda one: one.pop("status")),
        changed(lambda one: one["status"].update(abort_flag=0)),
        changed(lambda one: one["collective_counts"].update(AllReduce=-1)),
        changed(lambda one: one["collective_counts"].update(AllReduce=1.5)),
        "[" * 100_000,
    ],
)
def test_another_form_is_refused(answer: str) -> None:
    with pytest.raises(RasError, match="no answer of NCCL's RAS"):
        read_json(answer)


def test_what_later_versions_add_is_passed_over() -> None:
    found = json.loads(LAGS)
    found["communicators"][0]["ranks"][0] |= {"new": [1], "status": {**rank(0)["status"], "n": 1}}
    assert read_json(json.dumps({**found, "more": {}})) == read_json(LAGS)


# ---- its address


def test_ranks_answer_at_an_address_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RAS_ADDRESS, raising=False)
    address = rank_environment()[RAS_ADDRESS]
    assert address == ras_address() and not address.endswith(":28028")
    host, _, port = address.partition(":")
    with socket.socket() as other, pytest.raises(OSError):
        other.bind((host, int(port)))
    with socket.socket() as nccl:
        nccl.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        nccl.bind((host, int(port)))
        nccl.listen()
        socket.create_connection((host, int(port)), LIMIT_S).close()


def test_the_users_own_address_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RAS_ADDRESS, "localhost:28028")
    assert rank_environment()[RAS_ADDRESS] == ras_address() == "localhost:28028"


# ---- NCCL itself

RANK = """
import sys
import torch
import torch.distributed as dist
from trainchaos.recovery.collectives.nccl import be_a_host_of_its_own
rank = int(sys.argv[1])
be_a_host_of_its_own()
torch.cuda.set_device(0)
dist.init_process_group(
    "nccl", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2
)
value = torch.ones(1, device="cuda")
for _ in range(3 - rank):  # rank 1 leaves the last one out
    dist.all_reduce(value)
if rank:
    torch.cuda.synchronize()
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU and a torch with NCCL 2.28.7 or newer")
@pytest.mark.gpu
@pytest.mark.real
def test_nccl_says_which_rank_lags() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(number), port],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=rank_environment(),
            text=True,
        )
        for number in range(2)
    ]
    try:
        for one in ranks:
            assert one.stdout is not None and one.stdout.readline() == "there\n"
        found = ask(ras_address())
        assert [(one.pid, one.others - one.count) for one in found.behind] == [(ranks[1].pid, 1)]
        assert found.culprit == ranks[1].pid and found.missing == ()
    finally:
        for one in ranks:
            one.kill()
            one.communicate(timeout=LIMIT_S)
