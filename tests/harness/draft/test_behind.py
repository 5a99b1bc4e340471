"""What is found behind a shell script, by the processes that it started."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.draft.test_scenario_text import decided, saw
from tests.support.running import until
from trainchaos.harness.draft.draft import behind
from trainchaos.harness.draft.facts import Command, Finding, command_of
from trainchaos.harness.draft.frameworks import ScriptText
from trainchaos.harness.draft.watching import watch
from trainchaos.harness.script.processes.tree import FoundRank


def seen_behind(line: str, folder: Path, *processes: str) -> Command:
    """The command of a line that started these processes in a directory."""
    words = shlex.split(line)
    given = command_of(words, {"A": "1"}, ScriptText(), None)
    return behind(given, {tuple(shlex.split(one)): folder for one in [line, *processes]})


@pytest.mark.parametrize(
    ("line", "process", "said"),
    [
        (
            "bash train.sh",
            "/usr/bin/python3 /opt/env/bin/torchrun --nproc-per-node 4 --max-restarts 2 job.py",
            ("torchrun", 4, 2, "bash train.sh"),
        ),
        (
            "./train",
            "python -m torch.distributed.run --nproc_per_node=2 job.py",
            ("torchrun", 2, 0, "./train"),
        ),
        (
            "python main.py",
            "/usr/bin/python3 /usr/bin/deepspeed --num_gpus 2 job.py",
            ("deepspeed", 2, 0, "python main.py"),
        ),
        ("bash train.sh", "mpirun -np 3 python job.py", ("mpirun", 3, 0, "bash train.sh")),
        ("bash train.sh", "python job.py", ("shell", None, 0, "")),
        (
            "torchrun --nproc-per-node 2 job.py",
            "mpirun -np 3 python job.py",
            ("torchrun", 2, 0, ""),
        ),
    ],
)
def test_the_launcher_that_really_ran(
    line: str, process: str, said: tuple[str, int | None, int, str], tmp_path: Path
) -> None:
    found = seen_behind(line, tmp_path, process).launched
    assert (found.name, found.ranks, found.restarts, found.by) == said


def test_scripts_behind_a_script_are_read_where_they_ran(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import torchft\nos.environ['MY_CKPT_DIR']\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "tool.py").write_text("import deepspeed\n")
    found = seen_behind(
        "bash train.sh",
        tmp_path,
        "python3 -u torchrun --nproc-per-node 2 job.py --max-steps 40",
        "python site-packages/tool.py",
    )
    assert [one.name for one in found.frameworks] == ["torchft"]
    assert found.group == "REPLICA_GROUP_ID"
    assert found.script.place_variables == ["MY_CKPT_DIR"]
    assert found.inner[-2:] == ["--max-steps", "40"]
    assert found.words == ["bash", "train.sh"] and found.env["A"] == "1"


def test_torchrun_behind_a_script_has_the_variable_that_it_needs(tmp_path: Path) -> None:
    found = seen_behind("bash train.sh", tmp_path, "torchrun --nproc-per-node 2 job.py")
    assert found.env == {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "A": "1"}


def test_torchft_behind_a_script_keeps_the_store_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("from torchft import Manager\n")
    found = seen_behind("bash train.sh", tmp_path, "torchrun --nproc-per-node 1 job.py")
    assert found.env == {"A": "1"}


def test_the_kernel_says_what_ran_and_where_ranks_meet(tmp_path: Path) -> None:
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    words = [sys.executable, "-c", "import sys; sys.stdin.read()", "--x", "a b", ""]
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdin=subprocess.PIPE) as child:
        until(lambda: tuple(words) in watch.running([child.pid]))
        assert watch.running([child.pid, 2**22 + 1]) == {tuple(words): tmp_path}
        assert watch.rendezvous([child.pid], {}) == {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "1234",
        }
        assert watch.rendezvous([child.pid], env) == {}
        child.communicate(b"")


def test_what_a_script_sets_for_its_ranks_is_said(tmp_path: Path) -> None:
    seen = saw(found=2)
    seen.meets = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
    facts = decided(tmp_path, "bash train.sh", seen)
    assert "sets MASTER_ADDR 10.0.0.1, MASTER_PORT 1234 for its ranks" in _of(facts.findings).text
    assert "sets" not in _of(decided(tmp_path, "torchrun train.py", seen).findings).text


def test_ranks_that_their_environments_announce_are_missed(tmp_path: Path) -> None:
    seen = saw(found=4)
    seen.ranks = {rank: one for rank, one in seen.ranks.items() if rank < 3}
    facts = decided(tmp_path, "bash train.sh", seen)
    (finding,) = (one for one in facts.findings if one.name == "ranks")
    assert not finding.found and "3 found" in finding.text and "say 4" in finding.text
    assert facts.ranks == 4


def test_a_rank_that_names_itself_shows_that_there_are_others(tmp_path: Path) -> None:
    """As with Lightning's own launcher: the first process is rank 0 and starts the others."""
    seen = saw(found=2)
    seen.ranks = {1: FoundRank(rank=1, world=None, pid=11, started=1)}
    facts = decided(tmp_path, "python job.py", seen)
    assert "one names itself rank 1: there are at least 2" in facts.of("ranks").text
    assert facts.ranks == 2 and facts.of("ranks").needed
    assert facts.of("ranks").change.startswith("have each rank name itself")


def _of(findings: list[Finding]) -> Finding:
    """That of the launcher."""
    return next(one for one in findings if one.name == "launcher")
