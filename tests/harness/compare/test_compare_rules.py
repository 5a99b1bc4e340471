"""What makes a comparison fair enough to cite: like against like, the closed division, sweeps, and
a packed copy.
"""

from __future__ import annotations

import io
import lzma
import math
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.harness.compare.planned import FAMILY, KILL, Plain, asked, family_file, plan_for, played
from tests.support.commands.unreported import unreported
from tests.support.pages.sample_comparison import build, plain_trial
from trainchaos.chaos.cli import invoke
from trainchaos.chaos.errors import LogError, ScenarioError
from trainchaos.chaos.home import HOME
from trainchaos.harness.compare.environments import environments, tuned
from trainchaos.harness.compare.environments.stack import CommonJob, Stack, Value, Way
from trainchaos.harness.compare.plan.directory import ComparisonPlan, Directory
from trainchaos.harness.compare.plan.plan import Arm, entrants
from trainchaos.harness.compare.prepare import as_planned
from trainchaos.harness.compare.result import archive, rules
from trainchaos.harness.compare.result.gather import gather
from trainchaos.harness.compare.result.model import Comparison, Ratio
from trainchaos.harness.compare.result.summary import ratios_of
from trainchaos.harness.compare.stacks.hot_spare import HotSpare
from trainchaos.harness.compare.stacks.nvrx_inprocess_spare import NvrxInprocessSpare
from trainchaos.harness.compare.tuning import candidates, score, sweep_of
from trainchaos.harness.host import seal
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.reports.compare.facts import ComparisonFacts
from trainchaos.reports.compare.words import findings

pytestmark = pytest.mark.usefixtures("names_at_once")
NAN = (
    "{id: n, kind: tensor-corrupt, params: {surface: gradient, op: nan}, target: {rank: 1}, at:"
    " {step: 12}}"
)


class Ours(Plain):
    """Survivors go on."""

    ours: ClassVar[bool] = True
    way: ClassVar[Way] = "replica"


class OurSpare(Plain):
    """A spare takes over."""

    ours: ClassVar[bool] = True
    way: ClassVar[Way] = "spare"


class Peer(Plain):
    """Somebody else's, with a spare and options to sweep."""

    way: ClassVar[Way] = "spare"
    plain: ClassVar[Mapping[str, Value]] = {"wait": 60, "poll": 10}
    advised: ClassVar[Mapping[str, Value]] = {"wait": 5, "poll": 1}
    grid: ClassVar[Mapping[str, tuple[Value, ...]]] = {"wait": (1, 5), "poll": (1, 2)}


STACKS: dict[str, type[Stack]] = {"ours": Ours, "our-spare": OurSpare, "peer": Peer}


def planned(directory: Path, fault: str = KILL, **more: Any) -> ComparisonPlan:
    options = {"against": "ours"} | more
    return plan_for(asked(family_file(directory, "family", fault), **options), STACKS)


trial = partial(plain_trial, family="family", ranks=2)


def test_a_plan_says_what_is_set_against_what_and_which_family_tests_the_script(
    tmp_path: Path,
) -> None:
    """A stack is set against the built-in that goes on in its way."""
    plan = planned(tmp_path, KILL)
    assert {stack.label: stack.against for stack in plan.stacks} == {
        "ours default": "ours default",
        "our-spare default": "ours default",
        "peer default": "our-spare default",
    }
    assert not plan.families[0].script and planned(tmp_path, NAN).families[0].script


def test_ratios_are_of_what_a_stack_is_set_against_and_pool_no_family_that_tests_the_script() -> (
    None
):
    trials = [
        trial(label, seed, value, family=family)
        for label, value in {"ours": 1.0, "our-spare": 2.0, "peer": 8.0}.items()
        for seed in range(6)
        for family in ("kill", "hang", "nan")
    ]
    found = ratios_of(trials, "ours", against={"peer": "our-spare"}, apart=["nan"])
    by = {(one.label, one.family): one for one in found if one.metric == "recovery"}
    for label, value, against in (("peer", 4.0, "our-spare"), ("our-spare", 2.0, "ours")):
        one = by[label, "kill"]
        assert one.value == pytest.approx(value) and one.against == against
    assert by["peer", "every kind"].n == 12, "kill and hang, six pairs each"


@pytest.mark.slow
def test_the_headline_counts_no_family_that_tests_the_script() -> None:
    made = build(6)
    apart = made.model_copy(update={"script": ["nan", "corrupted-checkpoint"]})
    whole, some = ([line for line in findings(ComparisonFacts(one))] for one in (made, apart))
    assert "of 6 kinds of fault" in whole[0] and "of 4 kinds of fault" in some[0]
    assert any(line.startswith("nan and corrupted-checkpoint test what") for line in some)
    assert not any("nan" in line for line in some if not line.startswith("nan and"))


def against(made: Comparison, **update: object) -> list[str]:
    """Findings of the comparison with another ratio of torchft, or of every kill."""

    def changed(ones: Sequence[Any]) -> list[Any]:
        return [
            one.model_copy(update=update)
            if one.label == "torchft tuned" or getattr(one, "family", "") == "kill"
            else one
            for one in ones
        ]

    parts = {"stacks": changed(made.stacks)} if "against" in update else {}
    return findings(
        ComparisonFacts(made.model_copy(update={**parts, "ratios": changed(made.ratios)}))
    )


@pytest.mark.slow
def test_like_against_like_is_said() -> None:
    said = against(build(6), against="drop-replica")
    (line,) = [line for line in said if line.startswith("Like against like")]
    assert "torchft tuned" in line and "set against drop-replica" in line
    assert "times [" in line and "as long" in line


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("says", "shown"), [("slower", True), ("no difference shown", False), ("too few", False)]
)
def test_the_headline_gives_the_ratio_of_pairs_and_says_which_are_not_shown(
    says: str, shown: bool
) -> None:
    """Not the ratio of the medians: the two may lie on different sides of 1."""
    said = against(build(6), value=1.19, interval=(0.92, 1.45), says=says)
    (line,) = [line for line in said if line.startswith("The fastest other stack")]
    first, _, second = line.partition("not shown")
    assert ("1.19 times [" in first) is shown and ("1.19 times [" in second) is not shown


# the closed division


def test_the_closed_division_says_every_rule_that_a_plan_breaks(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError) as caught:
        planned(tmp_path, closed=True)
    said = str(caught.value)
    for words in ("is not one of scenarios/compare", "2 seeds", "--same"):
        assert words in said


@pytest.fixture
def closed(tmp_path: Path) -> ComparisonPlan:
    """A plan that keeps the rules."""
    plan = planned(tmp_path, repeat=6, same=True)
    return plan.model_copy(update={"provenance": {"commit": "abc", "slowest_lookup_s": 0.0}})


@pytest.mark.parametrize(
    ("provenance", "words"),
    [
        ({}, None),
        ({"commit": "abc+"}, "commit them"),
        ({"commit": ""}, "no commit"),
        ({"slowest_lookup_s": 5.0}, "name server"),
    ],
)
def test_code_that_is_no_commit_and_a_slow_name_server_break_a_rule(
    closed: ComparisonPlan, tmp_path: Path, provenance: dict[str, object], words: str | None
) -> None:
    plan = closed.model_copy(update={"provenance": {**closed.provenance, **provenance}})
    said = rules.broken(plan, [], tmp_path)
    assert len(said) == (words is not None) and (words or "") in "".join(said)


def test_what_ran_beside_the_arms_and_an_unequal_twin_break_rules(closed: ComparisonPlan) -> None:
    arm = Arm(label="ours default", family="family", like="family", seed=7)
    quiet, busy, unknown = (played(arm, busy=share) for share in (0.01, rules.BUSY + 0.1, None))
    labels = {"label": "ours again", "against": "ours default", "family": "family"}
    found = {"metric": "recovery", "n": 6, "value": 2.0, "interval": (1.5, 3.0), "says": "slower"}
    same = Ratio.model_validate(labels | found)
    assert rules.broken_by(closed, [quiet], [], 0) == []
    for played_arms, twins, missing, words in (
        ([quiet], [same], 0, "differs from itself"),
        ([quiet], [], 1, "1 arms"),
        ([quiet, busy], [], 0, "other programs ran before 1 of 2 arms"),
        ([unknown], [], 0, "not known"),
    ):
        assert words in rules.broken_by(closed, played_arms, twins, missing)[0]


# sweeps


def test_a_sweep_plays_every_combination_on_seeds_of_its_own_and_no_controls(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, tune="peer", against="", seed=9001)
    assert [stack.label for stack in plan.stacks] == [
        f"peer try {number:02}" for number in (1, 2, 3, 4)
    ]
    assert [stack.chosen for stack in plan.stacks] == [
        {"wait": wait, "poll": poll} for wait in (1, 5) for poll in (1, 2)
    ]
    assert {arm.family for arm in plan.arms} == {"family"} and len(plan.arms) == 8
    again = as_planned(plan, skip_missing=False)
    assert again.tune == "peer" and plan_for(again, STACKS).arms == plan.arms


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stacks": ["ours"]}, "--tune sweeps one stack"),
        ({"same": True}, "--tune sweeps one stack"),
        ({"closed": True}, "--tune sweeps one stack"),
        ({"tune": "ours"}, "no options to sweep"),
        ({"tune": "pear"}, "did you mean 'peer'"),
    ],
)
def test_a_sweep_is_of_one_stack_alone_that_has_options(
    tmp_path: Path, more: dict[str, object], words: str
) -> None:
    with pytest.raises(ScenarioError, match=words):
        planned(tmp_path, **{"tune": "peer", "against": ""} | more)


def test_the_fastest_that_survives_everything_is_chosen(tmp_path: Path) -> None:
    plan = planned(tmp_path, tune="peer", against="")
    times = {1: [0.1, math.inf], 2: [2.0, 2.2], 3: [1.0, 1.2], 4: [5.0, 5.0]}
    trials = [
        trial(f"peer try {number:02}", 7 + place, value, outcome=outcome)
        for number, values in times.items()
        for place, value in enumerate(values)
        for outcome in ["hung" if value == math.inf else "recovered"]
    ]
    sweep = sweep_of(plan, trials, Peer, "now")
    assert sweep.best == {"wait": 5, "poll": 1} and len(sweep.tried) == 4
    assert (sweep.tried[0].lost, sweep.tried[0].recovery["family"]) == (
        1,
        [0.1, math.inf],
    ), "fastest, and it loses one"
    assert "of which 3 survived" in sweep.words() and "loses" not in sweep.words()
    assert tuned.recorded("peer", tmp_path) is None
    path = tuned.write(sweep, tmp_path)
    assert tuned.recorded("peer", tmp_path) == sweep and "Infinity" not in path.read_text()
    lossy = sweep_of(plan, [one for one in trials if one.label == "peer try 01"], Peer, "now")
    assert lossy.best == {"wait": 1, "poll": 1} and "the best loses 1 of 2 jobs" in lossy.words()
    with pytest.raises(ScenarioError, match="none of 4 combinations survived"):
        sweep_of(plan, [], Peer, "now")


def test_no_family_counts_more_because_its_times_are_longer() -> None:
    assert score([[1.0, 1.0], [100.0, 100.0]]) == pytest.approx(10.0)
    assert score([[1.0, math.inf], [100.0, 100.0]]) == pytest.approx(10.0), (
        "what is lost counts first, and apart"
    )
    assert score([[math.inf], [1.0, 1.0]]) == math.inf


def test_tuned_is_what_the_sweep_chose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = planned(tmp_path, tune="peer", against="")
    trials = [trial(f"peer try {n:02}", seed, 1.0 / n) for n in (1, 2, 3, 4) for seed in (7, 8)]
    sweep = sweep_of(plan, trials, Peer, "now")
    monkeypatch.setattr(tuned, "recorded", lambda name: sweep if name == "peer" else None)
    (found,) = entrants(["peer:tuned"], STACKS, "both")
    assert found.stack.chosen() == sweep.best == {"wait": 5, "poll": 2}
    assert "A recorded sweep of wait, poll" in tuned.because("peer", Peer)
    assert dict(tuned.stack_of("peer", Peer, "default").chosen()) == {"wait": 60, "poll": 10}


SWEPT = sorted(name for name, kind in environments.stacks().items() if kind.grid)


@pytest.mark.parametrize("name", SWEPT)
def test_what_can_be_swept_has_options_of_its_own_and_a_recorded_sweep_is_of_them(
    name: str,
) -> None:
    kind = environments.find(name)
    tried = [one.stack.values for one in candidates(name, kind)]
    assert len(tried) > 1 and all(dict(values) != dict(tried[0]) for values in tried[1:])
    assert set(kind.grid) <= set(tried[0])
    sweep = tuned.recorded(name)
    if sweep is not None:
        assert (sweep.stack, sweep.grid) == (
            name,
            {key: list(values) for key, values in kind.grid.items()},
        )
        assert [one.values for one in sweep.tried] == tried and sweep.best in tried


def test_the_spare_of_the_wrapper_is_paid_for_and_started() -> None:
    job = CommonJob(
        size="nano", ranks=4, steps=10, global_batch=8, every=5, seed=1, data=Path("corpus.bin")
    )
    stack = NvrxInprocessSpare("tuned")
    argv = stack.drive(job, Path("python")).argv
    assert stack.provisioned(job) == HotSpare("tuned").provisioned(job) == 5
    assert argv[argv.index("--ranks") + 1] == "5" and argv[argv.index("--spares") + 1] == "1"


def test_a_stack_is_left_out_of_a_family_by_name(tmp_path: Path) -> None:
    plan = planned(tmp_path, without=[("peer", "family")])
    assert not [arm for arm in plan.arms if arm.label == "peer default" and arm.family]
    with pytest.raises(ScenarioError, match="kill does not take part"):
        planned(tmp_path, without=[("peer", "kill")])


# a packed copy


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of simulated runs, one with a fault and one without, with the outputs of their
    ranks.
    """
    return runs_in(tmp_path_factory.mktemp("run"))


def runs_in(place: Path) -> Path:
    """The same, in this directory."""
    for name, fault in (("ours-default.family", KILL), ("ours-default.control-of-family", "")):
        path = place / f"{name}.yaml"
        text = FAMILY.format(name=name, fault=fault, steps=30)
        text = text if fault else text.replace("faults:\n  - \n", "")
        path.write_text(text + "seed: 7\nlauncher: sim\nbaseline: none\n")
        unreported(["run", str(path), "--runs", str(place), "-q"])
        logs = (place / name / "latest").resolve() / "logs"
        logs.mkdir(exist_ok=True)
        (logs / "rank.txt").write_text("what a rank printed")
    return place


def comparison(tmp_path: Path, run: Path, *, sealed: bool = False) -> Directory:
    """A comparison of two arms, the runs of that directory; without their seals, to be changed."""
    directory = Directory(tmp_path / "made")
    plan = planned(tmp_path, stacks=["ours"], repeat=1)
    directory.write_plan(plan)
    for arm in plan.arms:
        directory.scenario(arm).parent.mkdir(parents=True, exist_ok=True)
        directory.scenario(arm).write_text(f"command: {HOME}/x\n")
        shutil.copytree(
            (run / arm.id.rpartition(".")[0] / "latest").resolve(),
            directory.runs / arm.id / "1",
            ignore=None if sealed else shutil.ignore_patterns("seal.json"),
        )
        directory.add(played(arm, f"runs/{arm.id}/1", busy=0.0))
    return directory


@pytest.mark.slow
def test_a_packed_comparison_gives_the_same_report(tmp_path: Path, run: Path) -> None:
    directory = comparison(tmp_path, run)
    before = gather(directory)
    assert before.trials[0].outcome == "recovered" and before.missing == 0
    path = archive.pack(directory, tmp_path / "made.tar.xz")
    first = path.read_bytes()
    archive.unpack(path, tmp_path / "out")
    assert gather(Directory(tmp_path / "out")) == before
    seals = [*(tmp_path / "out").rglob(seal.FILE)]
    assert {seal.check(RunDirectory(one.parent)).state for one in seals} == {"whole"}
    assert archive.pack(directory, path).read_bytes() == first, (
        "the same bytes from the same comparison"
    )
    names = sorted(
        str(one.relative_to(tmp_path / "out")) for one in (tmp_path / "out").rglob("*.*")
    )
    assert not any("logs" in name for name in names) and any("/events/" in name for name in names)


def test_a_packed_comparison_names_no_place_of_the_machine(tmp_path: Path, run: Path) -> None:
    archive.unpack(
        archive.pack(comparison(tmp_path, run), tmp_path / "made.tar.xz"), tmp_path / "out"
    )
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert not any(str(HOME) in text or str(Path.home()) in text for text in texts)
    assert any("/chaos/x" in text for text in texts)


def hostile(tmp_path: Path, entry: tarfile.TarInfo, data: bytes = b"") -> Path:
    path = tmp_path / "bad.tar.xz"
    with lzma.open(path, "wb") as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["../outside", "/absolute", "a/../../b", "link"])
def test_an_archive_writes_nothing_outside_and_holds_no_links(tmp_path: Path, name: str) -> None:
    entry = tarfile.TarInfo(name)
    if name == "link":
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with pytest.raises(LogError, match="not a plain file below it"):
        archive.unpack(hostile(tmp_path, entry, b"" if name == "link" else b"x"), tmp_path / "o/p")
    assert not (tmp_path / "o").exists()


def test_an_archive_that_is_too_large_or_torn_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES", 10)
    with pytest.raises(LogError, match="larger than"):
        archive.unpack(hostile(tmp_path, tarfile.TarInfo("plan.json"), b"x" * 11), tmp_path / "out")
    torn = tmp_path / "torn.tar.xz"
    torn.write_bytes(hostile(tmp_path, tarfile.TarInfo("x"), b"y").read_bytes()[:-20])
    with pytest.raises(LogError, match="cannot be unpacked"):
        archive.unpack(torn, tmp_path / "out")


@pytest.mark.slow
def test_the_command_reads_an_archive(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = archive.pack(comparison(tmp_path, run), tmp_path / "made.tar.xz")
    assert invoke(["compare", str(path), "--runs", str(tmp_path / "runs")]) == 0
    assert (tmp_path / "runs" / "compare" / "made" / "compare.html").is_file()
    assert invoke(["compare", str(tmp_path / "none.tar.xz"), "--runs", str(tmp_path / "runs")]) != 0
    assert "cannot be unpacked" in capsys.readouterr().err
    assert invoke(["compare", "x.yaml", "--without", "kill"]) == 2
