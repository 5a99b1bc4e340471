"""Answers of NCCL's RAS that were kept in a file, in the forms that NCCL's documentation shows."""

from __future__ import annotations

import pytest

from tests.support.fakes.ras_server import communicator, document, rank
from trainchaos.recovery.detection.ras_text import is_answer, read_answer

HEAD = """\
NCCL version 2.28.9 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          8            1          8        8

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
ROW = "    0         1         1         8         8         8   {}  {}\n"
WELL = HEAD + ROW.format("RUNNING", "OK") + "\nErrors\n======\n\nWarnings\n========\n\n"
INCOMPLETE = f"""\
{HEAD}{ROW.format("RUNNING", "INCOMPLETE")}
Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 4245 on node 10.0.0.1 managing GPU 5

#0-0 (27a079b828ff1a75) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 5 -- GPU 5 managed by process 4245 on node 10.0.0.1

Warnings
========

"""
DEAD = INCOMPLETE.replace(
    "INCOMPLETE\n  Missing communicator data from 1 job process",
    "DEAD\n  1 job process is considered dead (unreachable via the RAS network)",
    1,
)
MISMATCH = f"""\
{HEAD}{ROW.format("RUNNING", "MISMATCH")}
Errors
======

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  7 ranks have launched up to operation 64
  Rank 3 has launched up to operation 60 -- GPU 3 (NVML 1) managed by process 4243 on node node1

  Communicator ranks have different Broadcast operation counts
  6 ranks have launched up to operation 2
  2 ranks have not launched any operations
  Rank 3 -- GPU 3 managed by process 4243 on node node1
  Rank 4 -- GPU 4 managed by process 4244 on node node1

"""
OLD = MISMATCH.replace("different AllReduce operation", "different collective operation")
STATUS = MISMATCH.replace(
    "  Communicator ranks have different AllReduce",
    "  Communicator ranks have different status\n  7 ranks have status RUNNING\n"
    "  Rank 6 has status INIT -- GPU 6 managed by process 4246 on node node1\n"
    "  Communicator ranks have different AllReduce",
)


@pytest.mark.parametrize("text", [WELL, INCOMPLETE, DEAD, MISMATCH, OLD, STATUS])
def test_an_answer_is_recognised(text: str) -> None:
    assert is_answer(text.splitlines()[:40])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "step 1 loss 2.0\nJob summary\n",
        '{"step": 1, "nccl_version": "2.28"}\n{"step": 2}\n',
        "NCCL version 2.28.9+cuda13.0\nnode1:1:1 [0] NCCL INFO Bootstrap\n",
    ],
)
def test_other_files_are_not(text: str) -> None:
    assert not is_answer(text.splitlines())


def test_a_job_that_is_well() -> None:
    found = read_answer(WELL.splitlines())
    assert found.sentences == [] and found.communicators == 1


def test_who_is_missing_or_dead_is_told_of_once() -> None:
    (one,) = read_answer(INCOMPLETE.splitlines()).missing
    assert (one.rank, one.pid, one.host, one.dead) == (5, 4245, "10.0.0.1", False)
    (one,) = read_answer(DEAD.splitlines()).missing
    assert (one.rank, one.pid, one.dead) == (5, 4245, True)


@pytest.mark.parametrize(("text", "first"), [(MISMATCH, "AllReduce"), (OLD, "collective")])
def test_who_lags_in_which_collective(text: str, first: str) -> None:
    found = read_answer(text.splitlines())
    assert [(one.rank, one.collective, one.count, one.others) for one in found.behind] == [
        (3, first, 60, 64),
        (3, "Broadcast", 0, 2),
        (4, "Broadcast", 0, 2),
    ]
    assert found.behind[0].host == "node1" and found.culprit is None


def test_other_differences_are_no_lag() -> None:
    assert read_answer(STATUS.splitlines()) == read_answer(MISMATCH.splitlines())
    left = MISMATCH.replace(ROW.format("RUNNING", "MISMATCH"), ROW.format("ABORT", "MISMATCH"))
    assert read_answer(left.splitlines()).behind == (), "its ranks have been told to leave"


def test_the_majority_may_be_listed_too() -> None:
    listed = MISMATCH.replace(
        "operation 64\n",
        "operation 64\n  Rank 0 -- GPU 0 managed by process 4240 on node node1\n",
    )
    assert read_answer(listed.splitlines()) == read_answer(MISMATCH.splitlines())


def test_json_is_read_as_well() -> None:
    text = document(communicator([rank(0), rank(1, 40)]))
    assert is_answer(text.splitlines()[:40])
    assert [one.rank for one in read_answer(text.splitlines()).behind] == [1]
