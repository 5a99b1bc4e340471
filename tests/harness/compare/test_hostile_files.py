"""Files of a run and of a comparison that nobody of ours wrote: whatever stands in their place,
every command that reads or replaces them says so at once, in bounded memory, and touches nothing
else.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import re
import shutil
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.limited import limited
from trainchaos.chaos import files
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.commands.shared import say as saying
from trainchaos.chaos.errors import LogError
from trainchaos.chaos.events.log import read_actor
from trainchaos.harness.compare.plan.directory import ComparisonPlan, Directory, PlayedArm
from trainchaos.harness.compare.plan.plan import Arm
from trainchaos.harness.compare.result import archive
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.undo import live
from trainchaos.harness.undo.ledger import Ledger
from trainchaos.harness.undo.records import RemoveTree

SCENARIO = """
version: 1
name: files
launcher: sim
workload: {kind: mlp, ranks: 2, steps: 12, global_batch: 8}
recovery: drop-replica
baseline: none
sla: {recovery_time: ["median < 60s"]}
faults: [{id: kill, kind: process-kill, at: {step: 4}}]
"""
MOST_TIMES = 20  # by what the same command takes where nothing is spoilt
HOSTILE = "<script>alert(1)</script>\x1b[31m../../x\n\x07\u202e"
Spoil = Callable[[Path], object]


def rewritten(pattern: str, by: str | Callable[[re.Match[str]], str]) -> Spoil:
    """Values of a JSON text replaced."""
    return lambda path: path.write_text(re.sub(pattern, by, path.read_text()))


def instead(make: Callable[[Path], object]) -> Spoil:
    """Something else in the place of a file."""

    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


def beside(path: Path) -> Path:
    """The file that belongs to nobody here."""
    return next(above / "outside" for above in path.parents if (above / "outside").exists())


def sized(path: Path) -> None:
    os.truncate(path, 10 << 30)


SPOILT: dict[str, Spoil] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "no JSON": lambda path: path.write_bytes(b"\x00\xff\xfe }{\n"),
    "a list": lambda path: path.write_text("[1, 2]\n"),
    "of another version": lambda path: path.write_text(
        '{"schema_version": 9, "will": {}, "looks": 1e9, "kind": "trainchaos baseline"}\n'
    ),
    "deep": lambda path: path.write_text("[" * 100_000),
    "deep in keys": lambda path: path.write_text('{"a":' * 100_000),
    "many values": lambda path: path.write_text("[" + "[]," * 5_000_000),
    "huge numbers": rewritten(r"(?<=[:\[ ])\d+(?=[,\n\]}])", "1e999"),
    "NaN": rewritten(r"(?<=[:\[ ])\d+(?=[,\n\]}])", "NaN"),
    "long numbers": rewritten(r"(?<=[:\[ ])\d+(?=[,\n\]}])", "9" * 400),
    "of other types": rewritten(r'(?<=[:\[ ])("[^"]*"|\d+)(?=[,\n\]}])', "null"),
    "hostile": rewritten(r'(: ?)"[^"]*"', lambda found: found[1] + json.dumps(HOSTILE)),
    "half a pair": rewritten(r'(: ?)"[^"]*"', lambda found: found[1] + '"\\ud800"'),
    "10 GB": sized,
    "a pipe": instead(os.mkfifo),
    "a directory": instead(Path.mkdir),
    "a device": instead(lambda path: path.symlink_to("/dev/zero")),
    "a link": instead(lambda path: path.symlink_to(beside(path))),
    "a circle": instead(lambda path: path.symlink_to(path.name)),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A directory in which there is a run, a comparison, and a file that belongs to neither."""

    root: Path

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.root / "runs" / "files" / "r")

    @property
    def comparison(self) -> Directory:
        return Directory(self.root / "runs" / "compare" / "c")

    @property
    def outside(self) -> Path:
        return self.root / "outside"


def prepare(root: Path) -> Place:
    """A run that was played and gated, its baseline, a comparison of it, and that packed."""
    place = Place(root=root)
    scenario = root / "files.yaml"
    scenario.write_text(SCENARIO)
    assert invoke(["run", str(scenario), "--runs", str(root / "made"), "-q"]) == 0
    shutil.copytree((root / "made" / "files" / "latest").resolve(), place.run.root)
    (place.run.root / "seal.json").unlink()  # else no more than that it was changed would be said
    shutil.rmtree(root / "made")
    invoke(["gate", str(place.run.root), "-q"])
    invoke(["baseline", "save", str(place.run.root), "-o", str(root / "baseline.json")])
    arm = Arm(label="ours", family="kill", like="kill", seed=1)
    plan = ComparisonPlan(
        name="c",
        started="now",
        argv=["compare"],
        seeds=[1],
        deadline=9.0,
        reference="ours",
        same=False,
        price=None,
        currency="USD",
        families=[],
        stacks=[],
        skipped={},
        arms=[arm],
        provenance={},
    )
    place.comparison.write_plan(plan)
    place.comparison.scenario(arm).parent.mkdir()
    place.comparison.scenario(arm).write_text("name: x\n")
    shutil.copytree(place.run.root, place.comparison.runs / "ours" / "1")
    place.comparison.add(
        PlayedArm(
            arm=arm, run="runs/ours/1", usable=True, verdict="pass", seconds=1.0, finished="now"
        )
    )
    archive.pack(place.comparison, root / "packed.tar.xz")
    gone = live.HarnessProcess.me("0123456789").model_copy(
        update={"pid": 2**22 - 1, "start_time": 1}
    )
    (place.run.root / live.FILE).write_text(json.dumps(gone.model_dump()))
    (place.run.root / "made").mkdir()
    Ledger(place.run.ledger).will(RemoveTree(path=place.run.root / "made", inside=place.run.root))
    (root / "outside").write_text("precious")
    return place


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return prepare(tmp_path_factory.mktemp("model"))


@pytest.fixture
def place(model: Place, memory: Path) -> Iterator[Place]:
    yield copied(model, memory / "case")


def copied(model: Place, root: Path) -> Place:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(model.root, root)
    found = Place(root=root)
    lines = found.run.ledger.read_text().replace(str(model.root), str(root))
    found.run.ledger.write_text(lines)
    return found


EVERYTHING = tuple(SPOILT)
SOME = (
    "of other types",
    "hostile",
    "10 GB",
    "a pipe",
    "a link",
)  # where another command reads the file the same way
READ: list[tuple[str, str, tuple[str, ...]]] = [
    ("runs/files/r/results.json", "gate RUN", EVERYTHING),
    ("runs/files/r/scenario.resolved.yaml", "compare RUN --runs AWAY", SOME),
    ("runs/files/r/scenario.resolved.yaml", "baseline save RUN -o AWAY/b.json", EVERYTHING),
    ("runs/files/r/ledger.jsonl", "heal RUN", EVERYTHING),
    ("runs/files/r/ledger.jsonl", "ps --runs RUNS", SOME),
    ("runs/files/r/ledger.jsonl", "baseline save RUN -o AWAY/b.json", SOME),
    ("runs/files/r/live.json", "heal --runs RUNS", EVERYTHING),
    ("runs/files/r/live.json", "ps --runs RUNS", ("long numbers", *SOME)),
    ("runs/files/r/looks.json", "gate RUN", SOME),
    ("runs/files/r/gate.json", "gate RUN", SOME),
    ("runs/files/r/system.json", "baseline save RUN -o AWAY/b.json", SOME),
    ("runs/files/r/events/default.r0.faulted/orchestrator.jsonl", "ps --runs RUNS", SOME),
    ("runs/files/r/events/default.r0.faulted/orchestrator.jsonl", "analyze RUN", SOME),
    ("baseline.json", "baseline show BASELINE", EVERYTHING),
    ("baseline.json", "gate RUN --baseline BASELINE", ("hostile", "a pipe")),
    ("runs/compare/c/plan.json", "compare COMPARISON", EVERYTHING),
    ("runs/compare/c/trials.jsonl", "compare COMPARISON --archive AWAY/c.tar.xz", SOME),
    (
        "packed.tar.xz",
        "compare PACKED --runs AWAY",
        ("truncated", "no JSON", "10 GB", "a pipe", "a device"),
    ),
]


def command_line(place: Place, words: str) -> list[str]:
    places = {
        "RUNS": place.root / "runs",
        "RUN": place.run.root,
        "AWAY": place.root / "away",
        "BASELINE": place.root / "baseline.json",
        "COMPARISON": place.comparison.root,
        "PACKED": place.root / "packed.tar.xz",
    }
    found = [word.partition("/") for word in words.split()]
    return [str(places[head] / tail) if head in places else head for head, _, tail in found]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "words", "kinds"), READ, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_file_that_nobody_of_ours_wrote_is_an_error_or_says_nothing(
    model: Place, memory: Path, name: str, words: str, kinds: tuple[str, ...]
) -> None:
    wrong = []
    place = copied(model, memory / "case")
    _, usual_s, _ = limited(memory / "said", command_line(place, words))
    for what in kinds:
        place = copied(model, memory / "case")
        path = place.root / name
        assert path.is_file(), name
        if name.endswith("gate.json"):  # which is asked only where the record of looks is gone
            (place.run.root / "looks.json").unlink()
        SPOILT[what](path)
        code, took_s, said = limited(memory / "said", command_line(place, words))
        problems = ["too long"] * (took_s > MOST_TIMES * usual_s)
        problems += [
            word
            for word in ("defect of chaos", "cannot write the output", "\x1b", "\u202e")
            if word in said
        ]
        if code not in range(8) or problems or len(said) > 5_000:
            wrong.append(f"{what}: exit {code}, {problems}: {said[-600:]}")
        assert place.outside.read_text() == "precious", what
    assert not wrong, "\n".join(wrong)


DERIVED = ("report.html", "summary.md", "junit.xml", "metrics.prom", "trace.json", "results.json")


@pytest.mark.slow
def test_a_report_takes_the_place_of_what_has_its_name_and_writes_through_nothing(
    place: Place,
) -> None:
    for name in DERIVED:
        (place.run.root / name).unlink()
    for name in DERIVED[::2]:
        (place.run.root / name).symlink_to(place.outside)
    for name in DERIVED[1::2]:
        os.mkfifo(place.run.root / name)
    for name in DERIVED:  # names that a temporary file might have
        (place.run.root / f"{name}.tmp").symlink_to(place.outside)
    code, _, said = limited(place.root / "said", ["report", str(place.run.root)])
    assert code == 0, said
    assert place.outside.read_text() == "precious"
    assert all(
        (place.run.root / name).is_file() and not (place.run.root / name).is_symlink()
        for name in DERIVED
    )


def test_an_error_leaves_a_file_as_it_was_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with pytest.raises(KeyError), files.replacing(path) as stream:
        stream.write(b"half")
        raise KeyError
    assert [one.name for one in tmp_path.iterdir()] == ["file"] and path.read_text() == "before"


# ---- a comparison, which is given away


def test_nothing_that_a_link_leads_to_is_packed(place: Place) -> None:
    root = place.comparison.root
    run = root / "runs" / "ours" / "1"
    (run / "events" / "secret.jsonl").symlink_to(place.outside)
    (place.root / "more").mkdir()
    (place.root / "more" / "secret.jsonl").write_text("precious")
    (run / "events" / "more").symlink_to(place.root / "more")
    (run / "system.json").unlink()
    (run / "system.json").symlink_to(place.outside)
    archive.unpack(archive.pack(place.comparison, place.root / "c.tar.xz"), place.root / "out")
    names = [one for one in (place.root / "out").rglob("*") if one.is_file()]
    assert any(one.name == "orchestrator.jsonl" for one in names)
    assert not any("precious" in one.read_text() for one in names)


def test_a_trial_that_was_played_elsewhere_is_no_trial(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    line = json.loads(place.comparison.trials.read_text())
    for run in ("../../files/r", str(place.run.root)):
        place.comparison.trials.write_text(json.dumps({**line, "run": run}) + "\n")
        assert (
            invoke(
                ["compare", str(place.comparison.root), "--archive", str(place.root / "x.tar.xz")]
            )
            == 4
        )
        assert "leads out of the comparison" in capsys.readouterr().err
    assert not (place.root / "x.tar.xz").exists()


def test_a_name_as_long_as_the_memory_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.tar.xz"
    with lzma.open(path, "wb", preset=0) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        entry = tarfile.TarInfo("././@LongLink")
        entry.type, entry.size = tarfile.GNUTYPE_LONGNAME, 1 << 20
        tar.addfile(entry, io.BytesIO(bytes(1 << 20)))
    assert invoke(["compare", str(path), "--runs", str(tmp_path / "runs")]) == 4
    assert "too large" in capsys.readouterr().err


# ---- what is shown


def test_what_a_terminal_would_obey_is_shown_by_its_number(
    capsys: pytest.CaptureFixture[str],
) -> None:
    saying.say("a\x1b[31mb\u202e\x9b\U000e0001\ud800")
    saying.say("5\u202f% · ✓\n\tß")
    saying.say_json(["\x9b\U000e0001"])
    first, *others = capsys.readouterr().out.splitlines()
    assert first == r"a\x1b[31mb\u202e\x9b\U000e0001\ud800"
    assert others[:2] == ["5\u202f% · ✓", "\tß"]
    assert json.loads("".join(others[2:])) == ["\x9b\U000e0001"]


def test_every_command_prints_by_the_one_way_that_obeys_nothing() -> None:
    root = Path(saying.__file__).parents[1]
    own = [
        one
        for one in (*root.rglob("*.py"), root.parent / "cli.py")
        if "click.echo(" in one.read_text()
    ]
    assert sorted(one.name for one in own) == ["say.py", "stacks.py"]
    for line in (root / "stacks.py").read_text().splitlines():
        assert "click.echo(" not in line or "visible(" in line or '"\\r\\x1b[2K"' in line, line


def test_a_name_of_an_arm_leads_nowhere_else(place: Place, tmp_path: Path) -> None:
    for name in ("../../x", "..", "", "/etc", "a/b", "a\0b"):
        with pytest.raises(LogError, match="leads out of the run directory"):
            place.run.events(name)
    os.mkfifo(tmp_path / "w0.jsonl")
    assert read_actor(tmp_path / "w0.jsonl").problems == (
        "w0.jsonl: cannot be read: is not a regular file",
    )
