"""``workload.checkpoint.memory``: what may be said, and what an error says would work."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainchaos.chaos.cli import invoke
from trainchaos.chaos.scenario.workload import CheckpointSpec, MemorySpec, size_bytes

SCENARIO = """
version: 1
name: memory
launcher: sim
workload: {kind: mlp, ranks: 2, steps: 20, global_batch: 4, checkpoint: {memory: %s}}
recovery: hot-spare
faults: []
"""


def test_yes_no_and_all_of_it() -> None:
    assert CheckpointSpec().in_memory is None and CheckpointSpec(memory=False).in_memory is None
    assert CheckpointSpec(memory=True).in_memory == MemorySpec(every=5, limit="4GB", replicate=True)
    told = CheckpointSpec(memory={"every": 2, "limit": "1.5 GiB", "replicate": False}).in_memory  # type: ignore[arg-type]
    assert told is not None and (told.every, told.limit_bytes, told.replicate) == (
        2,
        3 << 29,
        False,
    )


@pytest.mark.parametrize("text", ["2", "GB", "-1GB", "2gb", "2 apples", "1e3MB", ""])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: write a number and B, kB, MB, GB or TB"):
        size_bytes(text)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{limit: lots}", "'lots' is not a size"),
        ("{limit: 0B}", "the limit is zero"),
        ("{every: 0}", "every"),
        ("{evry: 2}", "evry"),
    ],
)
def test_an_error_names_the_line_and_what_would_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: str, words: str
) -> None:
    path = tmp_path / "memory.yaml"
    path.write_text(SCENARIO % value)
    assert invoke(["validate", str(path)]) == 2
    said = capsys.readouterr()
    assert words in said.out + said.err and "memory.yaml:5" in said.out + said.err


def test_a_command_looks_after_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.yaml"
    path.write_text(
        "version: 1\nname: memory\nlauncher: local\nfaults: []\n"
        "workload: {command: [train], ranks: 2, steps: 20, checkpoint: {memory: true}}\n"
    )
    assert invoke(["validate", str(path)]) == 2
    said = capsys.readouterr()
    assert "a command looks after its checkpoints itself" in said.out + said.err
