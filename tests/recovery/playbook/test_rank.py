"""The order of what a log says: what outweighs what, what is no finding, who explains whom."""

from __future__ import annotations

import pytest

from trainchaos.recovery.playbook.book import match_text
from trainchaos.recovery.playbook.entry import Action

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1"
KILLED = "failed (exitcode: -9) local_rank: 0 (pid: 7) of binary: python"
WATCHDOG = "[rank2]: [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77)"
LOST = "kernel: NVRM: Xid (PCI:0000:5a:00): 79, GPU has fallen off the bus."
DISK = "OSError: [Errno 28] No space left on device: '/ckpt'"
AGAIN = "[default] Worker group FAILED. 3/3 attempts left; will restart worker group"
STEPS = [f"step {number} loss 2.3" for number in range(10)]


def order(*lines: str) -> list[str]:
    """Ids, best first."""
    return [match.entry.id for match in match_text(lines)]


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        ((CLOSED, OOM), "cuda-oom"),
        ((OOM, LOST), "xid-79"),
        ((CLOSED, KILLED, AGAIN, DISK, AGAIN, DISK, AGAIN, DISK, OOM), "disk-full"),
        ((OOM, *STEPS, KILLED), "signal-kill"),
        ((f"train.py:3: UserWarning: {DISK}", OOM), "cuda-oom"),
        ((f"2026-01-01 00:00:09 {DISK}", f"2026-01-01 00:00:02 {OOM}"), "cuda-oom"),
        ((f"[ 9.1] {DISK}", f"2026-01-01 00:00:02 {OOM}"), "disk-full"),
        (("Root Cause (first observed failure):", "exitcode : -9"), "signal-kill"),
        (("exitcode : -6", "Root Cause (first observed failure):", "exitcode : -9"), "signal-kill"),
    ],
)
def test_what_comes_first(lines: tuple[str, ...], first: str) -> None:
    assert order(*lines)[0] == first


def test_what_explains_another_comes_before_it_whatever_it_tells() -> None:
    found = match_text([KILLED.replace("-9", "-6"), WATCHDOG])
    assert [match.entry.id for match in found] == ["nccl-watchdog", "signal-abrt"]
    assert [match.because for match in found] == ["", "nccl-watchdog"]


def test_a_cause_explains_the_effects_of_its_attempt_only() -> None:
    assert [match.because for match in match_text([CLOSED, OOM])] == ["", "cuda-oom"]
    assert [match.because for match in match_text([CLOSED, AGAIN, OOM])] == ["", ""]


@pytest.mark.parametrize(
    "line",
    [
        "TensorBoard could not bind (6006: Address already in use)",
        "download failed: Connection reset by peer, retrying in 2 s",
        "node1:4:5 [0] NCCL INFO [Service thread] Connection closed by remote peer",
    ],
)
def test_who_does_not_train_or_goes_on_is_no_finding_in_a_log(line: str) -> None:
    assert order("step 1 loss 2.3", line) == []
    assert order(OOM, line) == ["cuda-oom"]


def test_of_a_line_alone_the_words_count() -> None:
    assert order("TensorBoard could not bind (6006: Address already in use)", "") == ["port-in-use"]


def test_a_traceback_that_python_passes_over_is_no_finding() -> None:
    ignored = ["Exception ignored in: <function __del__>", "  x()", "ValueError: closed", OOM]
    assert order(*ignored) == ["cuda-oom"]


def test_a_hint_that_the_job_went_on_after_is_none() -> None:
    refused = "[c10d] The client socket has failed to connect to [node0]:29500"
    assert order(refused, *STEPS) == [] and order(*STEPS, refused) == ["store-connect"]
    assert order(refused, *["step 3 of all ranks"] * 9) == ["store-connect"], "that is one step"


def test_the_driver_names_the_action_of_the_error_beside_it() -> None:
    order = "NVRM: Xid (PCI:0000:5a:00): 154, GPU recovery action changed from 0x0 (None) to "
    fatal = "NVRM: Xid (PCI:0000:5a:00): 149, NETIR Fatal XC0 i0 Link 04 (0x004a0d46)"
    first = match_text([fatal, f"{order}0x2 (Node Reboot Required)"])[0].entry
    assert (first.id, first.action) == ("xid-nvlink5-fatal", Action.REBOOT_NODE)
    first = match_text([OOM, f"{order}0x0 (None)"])[0].entry
    assert first.action is Action.FIX_CONFIGURATION, "memory that is full is no error of a device"


@pytest.mark.parametrize(
    ("line", "who"),
    [
        (WATCHDOG, "rank2"),
        (LOST, "PCI:0000:5a:00"),
        ("node1:9:8 [3] include/alloc.h:1 NCCL WARN Cuda failure 'out of memory'", "node1:9:8 [3]"),
        (OOM, ""),
    ],
)
def test_who_says_it(line: str, who: str) -> None:
    assert match_text([line])[0].who == who
