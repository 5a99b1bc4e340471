"""``chaos explain``: numbers, texts, logs and stored runs, and what is wrong with each."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.recovery.detection.test_ras_text import DEAD
from tests.support.commands.unreported import unreported
from tests.support.fakes.ras_server import communicator, document, missing, rank, ras_server
from trainchaos.chaos import cli
from trainchaos.harness.explain import text as words
from trainchaos.recovery.playbook import book

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "tests" / "harness" / "judge" / "stored"
SCENARIO = """\
version: 1
name: told
seed: 5
workload: {kind: mlp, ranks: 4, steps: 60, global_batch: 16, checkpoint: {every: 10, keep: 3}}
recovery: hot-spare
launcher: sim
baseline: none
faults:
  - {id: xid, kind: health-event, params: {what: xid, code: 79},
      target: {role: worker, select: one}, at: {step: 15}}
  - {id: kill, kind: process-kill, target: {rank: 2}, at: {step: 33, phase: backward}}
  - {id: oom, kind: gpu-oom, target: {rank: 1}, at: {step: 42}}
  - {id: nan, kind: tensor-corrupt, params: {surface: gradient, op: nan}, target: {rank: 1},
      at: {step: 50}}
  - {id: late, kind: process-kill, target: {rank: 0}, at: {step: 900}}
"""
LOG = """\
[rank0]: step 10 loss 2.3
[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=77, OpType=ALLREDUCE)
RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:26483
kernel: NVRM: Xid (PCI:0000:5a:00): 79, pid=3, GPU has fallen off the bus.
"""
RAS_JSON = document(communicator([rank(0), rank(1, 40), rank(2)], [missing(3, dead=True)]))
Explain = Callable[..., tuple[int, str, str]]


@pytest.fixture
def explain(capsys: pytest.CaptureFixture[str]) -> Explain:
    """Runs ``chaos explain``: exit code, standard output, standard error."""

    def invoke(*argv: object) -> tuple[int, str, str]:
        code = cli.invoke(["explain", *map(str, argv)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run with three faults that do harm, a warning, and one that never comes."""
    place = tmp_path_factory.mktemp("told")
    (place / "told.yaml").write_text(SCENARIO)
    code = unreported(["run", str(place / "told.yaml"), "--runs", str(place / "runs"), "-q"])
    assert code == 3, "a fault that never fired is inconclusive"
    return place / "runs" / "told" / "latest"


# --- NCCL's RAS


def test_an_answer_of_ras_says_who_is_gone_and_who_lags(explain: Explain, tmp_path: Path) -> None:
    (tmp_path / "ras.txt").write_text(RAS_JSON)
    code, out, err = explain(tmp_path / "ras.txt")
    assert (code, err) == (0, "") and "NCCL's RAS, communicators: 1" in out
    folded = " ".join(out.split())
    assert "rank 3 (process 4243 on 10.0.0.1) is considered dead" in folded
    assert "rank 1 (process 4241 on 10.0.0.1) lags: it has launched AllReduce 40 times" in folded
    assert "dead: NCCL's RAS has given a process up" in folded
    assert "to do restart: restart what failed" in folded
    assert "behind: A rank has launched fewer collectives" in folded
    assert explain("ras", tmp_path / "ras.txt")[1] == out
    found = json.loads(explain(tmp_path / "ras.txt", "--format", "json")[1])
    assert [one["rank"] for one in found["dead"]] == [3] and found["missing"] == []
    assert [one["others"] for one in found["behind"]] == [41]
    assert [one["id"] for one in found["entries"]] == ["nccl-ras-dead", "nccl-ras-behind"]
    (tmp_path / "ras.txt").write_text(DEAD)
    assert (
        "rank 5 (process 4245 on 10.0.0.1) is considered dead" in explain(tmp_path / "ras.txt")[1]
    )


def test_ras_is_asked_where_an_address_is_given(explain: Explain) -> None:
    with ras_server(RAS_JSON) as server:
        code, out, _ = explain("ras", server.address)
    assert code == 0 and out.startswith(f"{server.address}: NCCL's RAS, communicators: 1")


def test_what_ras_does_not_complain_of_or_answer(explain: Explain, tmp_path: Path) -> None:
    with ras_server(document(communicator([rank(0), rank(1)]))) as server:
        code, out, err = explain("ras", server.address)
    assert (code, out) == (1, "") and "no rank is named as dead, missing or behind" in err
    with ras_server(knows=False) as server:
        code, out, err = explain("ras", server.address)
    assert (code, out) == (2, "") and "NCCL 2.28.7" in err
    assert explain("ras", "nowhere")[0] == 2
    (tmp_path / "cut.json").write_text(RAS_JSON[:400])
    assert explain(tmp_path / "cut.json")[0] == 2


# --- numbers


def test_an_xid(explain: Explain) -> None:
    code, out, err = explain("xid", 79)
    assert (code, err) == (0, "")
    assert out.startswith("XID 79: The GPU has fallen off the bus")
    for line in (
        "  cause   bus",
        "  whose   hardware, usually",
        "  to do   reboot-node: take the work off the node and restart it",
        "  warns   the device is failing: move the work off it at once",
        "  source  https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html",
    ):
        assert line in out.splitlines()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("signal", "SIGBUS"), "SIGBUS: A memory access that cannot be served"),
        (("signal", "7"), "SIGBUS: "),
        (("signal", "bus"), "SIGBUS: "),
        (("signal", "SIGUSR1"), "SIGUSR1: A signal for the program's own use"),
        (("exit", "137"), "exit code 137 (SIGKILL): Killed from outside"),
        (("exit", "-9"), "exit code -9 (SIGKILL): Killed from outside"),
        (("exit", "1"), "exit code 1: Any error"),
        (("sxid", "20034"), "SXid 20034: A fatal error of a port of an NVSwitch"),
        (("text", "NCCL WARN NET/IB : Got completion from peer 10.0.0.2<5> with error 12"), "line"),
        (("text", "CUDA", "out", "of", "memory"), "line 1  | CUDA out of memory"),
        (("text", "--- CUDA out of memory"), "line 1"),
    ],
)
def test_what_is_asked_in_words(explain: Explain, asked: tuple[str, ...], said: str) -> None:
    code, out, err = explain(*asked)
    assert (code, err) == (0, "") and out.startswith(said)


def test_several_at_once_and_one_of_them_unknown(explain: Explain) -> None:
    code, out, err = explain("xid", 94, 999, 48)
    assert code == 2
    assert "XID 94: " in out and "XID 48: " in out
    assert err == (
        "no entry for XID 999: NVIDIA's catalogue lists 1 to 172; the nearest are 171, 172\n"
    )


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("xid", "0"), "the nearest are 1, 2"),
        (("xid", "abc"), "xid needs a number, and 'abc' is none"),
        (("xid", "7.5"), "xid needs a number"),
        (("xid", "9" * 40), "xid needs a number"),
        (("sxid", "20035"), "there are, with gaps, 10001 to 24007; the nearest are"),
        (("signal", "SIGNONE"), "there is no signal 'SIGNONE'"),
        (("signal", "SIGRTMIN"), "no entry for SIGRTMIN"),
        (("signal", "9999"), "there is no signal '9999'"),
        (("exit", "77"), "no entry for exit code 77: it is the program's own"),
        (("exit", "300"), "300 is no exit code"),
        (("exit", "-100"), "-100 is no exit code"),
        (("xid",), "'xid' needs a number"),
        (("text",), "'text' needs the words"),
        (("xid", "79", "--fro"), "no such option: --fro"),
        ((), "Missing argument"),
        (("train.log", "other.log"), "one file or run at a time"),
        (("no-such-file",), "no-such-file: cannot be read: No such file or directory"),
        (("runs/none/latest",), "cannot be read"),
        ((os.devnull,), "cannot be read: is not a regular file"),
    ],
)
def test_what_cannot_be_explained(explain: Explain, asked: tuple[str, ...], why: str) -> None:
    code, out, err = explain(*asked)
    assert (code, out) == (2, "") and why in err


# --- texts


def test_a_log_is_explained_best_first(explain: Explain, tmp_path: Path) -> None:
    (log := tmp_path / "train.log").write_text(LOG)
    code, out, err = explain(log)
    assert (code, err) == (0, "")
    shown = [line for line in out.splitlines() if line.startswith("line ")]
    assert [line.split("|")[0].strip() for line in shown] == ["line 4", "line 2", "line 3"]
    assert "xid-79: The GPU has fallen off the bus" in out
    assert "  then    because of it: nccl-watchdog (line 2), gloo-closed (line 3)" in out
    assert "  because of xid-79 (line 4)" in out and "  who     rank1" in out
    assert "what failed first is not here" not in out


def test_effects_alone_are_called_that(explain: Explain, tmp_path: Path) -> None:
    (log := tmp_path / "train.log").write_text("\n".join(LOG.splitlines()[:3]))
    code, out, _ = explain(log)
    assert code == 0
    assert "All of these are felt when something else failed: what failed first is not here." in out
    assert "The cause is not known." in out
    assert json.loads(explain(log, "--format", "json")[1])["known"] is False


def test_only_the_best_are_shown_in_full(explain: Explain, tmp_path: Path) -> None:
    texts = [entry for entry in book.playbook().entries if entry.example]
    (log := tmp_path / "all.log").write_text("\n".join(entry.example for entry in texts))
    code, out, _ = explain(log)
    lines = out.splitlines()
    assert code == 0 and f"{len(texts)} lines, {len(texts)} signs" in lines[0]
    assert len([one for one in lines if one.startswith("line ")]) == words.IN_FULL
    also = [one for one in lines if one.startswith("also ")]
    assert len(also) == len(texts) - words.IN_FULL


@pytest.mark.parametrize(
    ("content", "code", "why"),
    [
        (b"", 1, "is empty"),
        (b"all is well\nstep 2\n", 1, "2 lines, and the playbook knows none of them"),
        (b"\x1f\x8b\x08\x00\x00\x00", 2, "is no text, but binary data"),
        (b"\xff\xfea\x00b\x00", 2, "is no text, but binary data"),
    ],
)
def test_a_log_that_says_nothing(
    explain: Explain, tmp_path: Path, content: bytes, code: int, why: str
) -> None:
    (log := tmp_path / "train.log").write_bytes(content)
    found, out, err = explain(log)
    assert (found, out) == (code, "") and why in err
    assert json.loads(explain(log, "--format", "json")[1] or '{"matches": []}')["matches"] == []


def test_odd_lines_are_read(
    explain: Explain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (log := tmp_path / "train.log").write_bytes(b"\xff\xfe \x1b[31mCUDA out of memory\r\n")
    code, out, _ = explain(log)
    assert code == 0 and "\x1b" not in out and "\\x1b[31mCUDA out of memory" in out
    bar = "".join(f"\r{n}%" for n in range(100))
    log.write_bytes(f"{bar}\rKilled\n".encode())
    assert "killed: " in explain(log)[1], "the end of a progress bar is a line"
    monkeypatch.setattr("trainchaos.chaos.commands.explain.MOST_AT_ONCE", 1 << 12)
    log.write_text("x" * (1 << 18) + "\nCUDA out of memory\n")
    assert "cuda-oom" in explain(log)[1], "a line without end is read in parts"


def test_standard_input(explain: Explain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(LOG.encode())))
    code, out, _ = explain("-")
    assert code == 0 and out.startswith("standard input: 4 lines, 3 signs")
    assert explain("text", "all is well") == (1, "", "the text: nothing known\n")


# --- runs


@pytest.mark.slow
def test_the_incidents_of_a_run(explain: Explain, told: Path) -> None:
    code, out, err = explain(told)
    assert (code, err) == (0, "")
    title, *paragraphs = out.strip().split("\n\n")
    assert title == ("told: INCONCLUSIVE, simulated, 4 incidents, 1 planned fault that never fired")
    xid, kill, oom, nan = paragraphs
    assert ", cause warning (XID 79" in xid and "; that is who was hit" in xid
    assert "reported XID 79 of rank" in xid and "The GPU has fallen off the bus" in xid
    assert "  warns   the device is failing" in xid
    assert "at step 33, " in kill and "process-kill hit w2 (rank 2)" in kill
    assert "  blame   w2 (rank 2), cause exit (signal 9); that is who was hit" in kill
    assert "  cost    detected after " in kill and ", recovered after " in kill
    assert "w2 was ended by SIGKILL: Killed from outside" in kill
    assert "  to do   restart: " in kill
    assert "raised OutOfMemoryError" in oom and "  to do   fix-configuration: " in oom
    assert "cause nonfinite" in nan and "; that is who was hit" in nan
    assert "Loss or gradients are not finite" in nan


def test_the_incidents_of_a_run_as_json(explain: Explain, told: Path) -> None:
    code, out, _ = explain(told, "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert (found["scenario"], found["simulated"], found["never_fired"]) == ("told", True, 1)
    assert found["unexplained"] == []
    by_name = {one["fault"]: one for one in found["incidents"]}
    assert set(by_name) == {"xid", "kill", "oom", "nan"}
    kill = by_name["kill"]
    assert kill["hit"] == ["w2"] and kill["blamed"]["process"] == "w2"
    assert kill["blamed_who_was_hit"] is True and kill["outcome"] == "recovered"
    assert 0 < kill["detection_time"] < kill["recovery_time"]
    assert [sign["entry"]["id"] for sign in kill["signs"]] == ["signal-kill"]
    assert kill["action"] == "restart" and by_name["xid"]["action"] == "reboot-node"
    assert by_name["xid"]["blamed"]["cause"] == "warning"
    assert by_name["xid"]["blamed_who_was_hit"] is True
    assert by_name["oom"]["signs"][0]["entry"]["id"] == "cuda-oom"


def unpacked(name: str, place: Path) -> Path:
    """A run that was stored long ago."""
    with tarfile.open(STORED / f"{name}.tar.xz") as packed:
        packed.extractall(place, filter="data")
    return place / name


def test_a_stored_run_of_a_command(explain: Explain, tmp_path: Path) -> None:
    code, out, _ = explain(unpacked("torchrun-beacon-kill", tmp_path))
    assert code == 0
    assert "w1 was ended by SIGKILL" in out and "w0 was ended by SIGTERM" in out
    assert "4 steps lost (back to step 30)" in out
    assert out.index("SIGKILL") < out.index("SIGTERM"), "what others feel comes last"


def test_a_failure_that_no_fault_explains(explain: Explain, tmp_path: Path) -> None:
    run = unpacked("torchrun-beacon-kill", tmp_path)
    log = run / "events" / "default.r0.faulted" / "orchestrator.jsonl"
    kept = [line for line in log.read_text().splitlines(True) if '"fault_' not in line]
    log.write_text("".join(kept))
    code, out, _ = explain(run)
    assert code == 0
    assert "1 failure that no fault explains" in out
    assert "A failure that no fault explains, arm default.r0.faulted" in out


@pytest.mark.parametrize("damage", ["", "{", "\0", "[]", "a: &a [*a]"])
def test_a_damaged_run_is_one_clear_error(explain: Explain, tmp_path: Path, damage: str) -> None:
    run = unpacked("torchrun-beacon-kill", tmp_path)
    (run / "scenario.resolved.yaml").write_text(damage)
    code, out, err = explain(run)
    assert (code, out) == (2, "") and "is damaged" in err


# --- the command line


@pytest.mark.slow
def test_a_number_needs_no_package_but_click() -> None:
    code = (
        "import sys\nfrom trainchaos.chaos.cli import invoke\n"
        "assert invoke(['explain', 'xid', '79']) == 0\n"
        "heavy = {'torch', 'numpy', 'pandas', 'pydantic', 'ruamel'} & {*sys.modules}\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def completions(*words: str) -> set[str]:
    """What a shell would offer for the last word."""
    from click.shell_completion import BashComplete

    offered = BashComplete(cli.cli, {}, "chaos", "_CHAOS_COMPLETE").get_completions(
        [*words[:-1]], words[-1]
    )
    return {item.value for item in offered}


def test_a_shell_completes_its_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "told" / "one").mkdir(parents=True)
    assert "explain" in completions("expl")
    assert completions("explain", "x") >= {"xid"}
    assert completions("explain", "si") >= {"signal"}
    assert completions("explain", "ra") >= {"ras"}
    assert completions("explain", "runs/t") == {"runs/told/one"}


def test_the_page_says_what_the_command_does() -> None:
    page = (ROOT / "docs" / "explain.md").read_text()
    for word in ("`chaos explain`", *(f"`{action.value}`" for action in words.ABOUT)):
        assert word in page
    examples = [line for line in page.splitlines() if line.startswith("chaos explain ")]
    assert len(examples) == 8
