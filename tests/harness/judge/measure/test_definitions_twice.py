"""Every metric computed twice: by the product, and by the definitions of docs/metrics.md as they
stand there, from the lines of the logs alone.

Nothing of the judge is used for the second: only ``batch``, the reference order of samples, which
is the job's own. Six runs are stored; one is played on the simulator, as none of these has two
faults, and one is a stored one with a commit moved. They have one clock, no lasting fault, no
evaluation and no damage, so that a few lines do.
"""

from __future__ import annotations

import itertools
import json
import math
import tarfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support.search.simulate import cell_of, play
from trainchaos.chaos.events.log import read_log
from trainchaos.harness.judge.measure.measure import METRICS, measure
from trainchaos.recovery.data.order import batch

HERE = Path(__file__).parent
STORED = HERE.parent / "stored"
AGENTS = HERE.parents[2] / "mutations/stored/agents"
KILLED, NAN = STORED / "kill-one-rank.tar.xz", STORED / "nan-gradient.tar.xz"
COMMAND = STORED / "torchrun-beacon-kill.tar.xz"
RUNS = {
    "kill-under-restart": (KILLED, "recovery=checkpoint-restart"),
    "hot-spare": (KILLED, "recovery=hot-spare"),
    "drop-replica": (KILLED, "recovery=drop-replica"),
    "bad-values": (NAN, "recovery=checkpoint-restart"),
    "command": (COMMAND, "default"),
    "node": (AGENTS, ""),
    "two-kills": (None, ""),
    "long-stall": (KILLED, "recovery=hot-spare"),
}
NOT_COVERED = {
    "mfu",  # of GPUs alone; tests/harness/judge/measure/test_metrics.py has it
    "steady_overhead",  # of benchmarks alone
}
Line = dict[str, Any]


@cache
def unpacked(archive: Path, into: Path) -> Path:
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")
    return next((into / archive.name.partition(".")[0]).glob("events"))


def arms(name: str, folder: Path) -> tuple[Path, Path]:
    """Where the logs are of a faulted arm and its control."""
    place, cell = RUNS[name]
    if place is None:
        kills = [
            {
                "id": f"kill{step}",
                "kind": "process-kill",
                "at": {"step": step},
                "target": {"rank": 1},
            }
            for step in (14, 27)
        ]
        scenario = cell_of("checkpoint-restart", kills, steps=40, every=6)
        faulted, control = (
            play(scenario, folder / arm, seed=5, arm=arm).directory
            for arm in ("faulted", "control")
        )
        return faulted, control
    if place.is_dir():
        return place / "faulted", place / "control"
    events = unpacked(place, folder / name)
    faulted, control = (events / f"{cell}.r0.{arm}" for arm in ("faulted", "control"))
    if name == "long-stall":
        _lengthen(faulted / "w0.jsonl")
    return faulted, control


def _lengthen(log: Path) -> None:
    """Have rank 0 commit a step that is saved a second before the others do: the stall after it is
    longer than the next step.
    """
    lines = [json.loads(line) for line in log.open()]
    for line in lines:
        line["time_ns"] -= 10**9 * (line["kind"] == "step_committed" and line["step"] == 20)
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


class Arm:
    """The lines of an arm, and its steps in order: (generation, step) -> what is asked of it."""

    def __init__(self, folder: Path) -> None:
        lines = [json.loads(x) for path in folder.glob("*.jsonl") for x in path.open()]
        self.lines = sorted(lines, key=lambda line: line["time_ns"])
        self.info = self.of("run_started")[0]["data"]
        self.start, self.end = (self.of(k)[0]["time_ns"] for k in ("run_started", "run_finished"))
        self.members = {
            x["generation"]: x["data"]["members"] for x in self.of("generation_started")
        }
        self.began = {x["generation"]: x["time_ns"] for x in self.of("generation_started")}
        if self.info.get("observed"):
            self._of_reports()
        else:
            self._of_commits()
        self.lineage = self._lineage()

    def of(self, *kinds: str) -> list[Line]:
        return [line for line in self.lines if line["kind"] in kinds]

    def _of_commits(self) -> None:
        self.ready = {x["generation"]: x["time_ns"] for x in self.of("generation_ready")}
        self.resumed = {
            x["generation"]: x["data"]["resume_step"] for x in self.of("generation_ready")
        }
        self.stated = {x["generation"]: x["time_ns"] for x in self.of("state_ready")}
        self.grouped = {x["generation"]: x["time_ns"] for x in self.of("group_formed")}
        self.commits = defaultdict[tuple[int, int], list[Line]](list)
        for line in self.of("step_committed"):
            self.commits[line["generation"], line["step"]].append(line)

    def _of_reports(self) -> None:
        """Of a command a step ends with its first report; it goes on one step before the first one
        that is reported, and began it a usual step before.
        """
        self.commits = defaultdict[tuple[int, int], list[Line]](list)
        first: dict[tuple[int, int], int] = {}
        last: dict[int, int] = {}
        for line in self.of("step_reported"):
            key, said = (line["generation"], line["step"]), line["data"]["reported_ns"]
            said = min(said, line["time_ns"])
            first[key] = min(said, first.get(key, said))
            self.commits[key].append(line)
        for key in sorted(first):  # in order of time, whatever a rank's clock says
            last[key[0]] = first[key] = max(first[key], last.get(key[0], self.began[key[0]]))
        self.first = first
        usual = median(
            at - first[number, step - 1]
            for (number, step), at in first.items()
            if (number, step - 1) in first
        )
        opened = {number: min(s for n, s in first if n == number) for number in self.began}
        self.resumed = {number: step - 1 for number, step in opened.items()}
        self.ready = {
            number: max(self.began[number], round(first[number, step] - usual))
            for number, step in opened.items()
        }
        self.stated, self.grouped = self.ready, self.began

    def t_end(self, key: tuple[int, int]) -> int:
        if self.info.get("observed"):
            return self.first[key]
        return max(line["time_ns"] for line in self.commits[key])

    def committed(self, key: tuple[int, int]) -> float:
        """When the job committed a step; infinite: never."""
        there = {line["actor"] for line in self.commits[key]}
        if self.info.get("observed") or there >= set(self.members[key[0]]):
            return self.t_end(key)
        later = min((n for n in self.resumed if n > key[0]), default=None)
        return self.ready[later] if later and self.resumed[later] >= key[1] else math.inf

    def _lineage(self) -> list[tuple[int, int]]:
        owner: dict[int, int] = {}
        for number in sorted(self.resumed):
            owner = {s: n for s, n in owner.items() if s <= self.resumed[number]}
            owner |= {s: n for n, s in self.commits if n == number}
        done = ((n, s) for s, n in owner.items() if self.committed((n, s)) < math.inf)
        return sorted(done, key=lambda key: key[1])

    def time(self, key: tuple[int, int]) -> float:
        number, step = key
        before = (number, step - 1)
        own = before in self.commits and step - 1 > self.resumed[number]
        return (self.t_end(key) - (self.t_end(before) if own else self.stated[number])) / 1e9

    def pauses(self) -> dict[tuple[int, int], float]:
        """(generation, step) -> from rank 0's commit to its next batch."""
        taken = {
            (x["generation"], x["step"]): x["time_ns"]
            for x in self.of("batch_taken")
            if x["data"]["rank"] == 0
        }
        done = {
            (x["generation"], x["step"]): x["time_ns"]
            for x in self.of("step_committed")
            if x["data"]["rank"] == 0
        }
        # a next step that nobody committed paused nobody
        return {
            (n, s): (taken[n, s + 1] - at) / 1e9
            for (n, s), at in done.items()
            if (n, s + 1) in taken and (n, s + 1) in self.commits
        }

    def stalls(self) -> dict[tuple[int, int], float]:
        """No evaluation is planned in these runs."""
        saved = {(x["generation"], x["step"]) for x in self.of("checkpoint_saving")}
        pauses = self.pauses()
        usual = median([p for key, p in pauses.items() if key not in saved] or [0.0])
        return {key: max(0.0, p - usual) for key, p in pauses.items() if key in saved}

    def net(self, key: tuple[int, int]) -> float:
        return self.time(key) - self.stalls().get((key[0], key[1] - 1), 0.0)

    def samples(self, key: tuple[int, int]) -> int:
        if self.info.get("observed"):
            shares = {x["data"]["rank"]: x["data"]["samples"] for x in self.commits[key]}
            return sum(shares.values()) * len(self.members[key[0]]) // len(shares)
        return self.commits[key][0]["data"]["samples"]


def by_definition(arm: Arm, control: Arm) -> dict[str, list[float]]:
    info, stalls, lineage = arm.info, arm.stalls(), arm.lineage
    ranks, provisioned = info["ranks"], info["ranks"] + info["spares"]
    wall = (arm.end - arm.start) / 1e9
    full = [k for k in control.lineage if len(control.members[k[0]]) == ranks]
    steady = [k for k in full if k[1] > control.resumed[k[0]] + 1] or full
    ideal = median(control.net(key) for key in steady)
    size = info["global_batch"]

    kept = {k: max(0.0, arm.time(k) - stalls.get((k[0], k[1] - 1), 0.0)) for k in lineage}
    useful = 0.0
    for small in (True, False):  # no fault of these lasts
        mine = [k for k in lineage if (len(arm.members[k[0]]) < ranks) == small]
        due = sum(ideal * arm.samples(k) / size for k in mine)
        useful += min(due, sum(kept[k] for k in mine)) * ranks / provisioned
    found: dict[str, list[float]] = {
        "goodput": [useful / wall],
        "ettr": [sum(kept.values()) / wall],
        "throughput": [sum(arm.samples(k) for k in lineage) / wall],
        "step_time": [median(arm.net(k) for k in lineage)],
        "checkpoint_stall": list(stalls.values()),
        "saves_failed": [len(arm.of("checkpoint_failed"))],
        "alarms_unexplained": [_unexplained(arm)] if info.get("monitored") else [],
        **(_samples(arm) if not info.get("observed") else {}),
        **_of_incidents(arm, ideal),
    }
    return found


def _samples(arm: Arm) -> dict[str, list[float]]:
    size, order = arm.info["global_batch"], arm.info["order"]
    last = max(step for _, step in arm.lineage)
    due = [x for s in range(1, last + 1) for x in batch(s, size, order["samples"], order["seed"])]
    took = [
        sample
        for line in arm.of("batch_taken")
        if (line["generation"], line["step"]) in arm.lineage
        for sample in line["data"]["samples"]
    ]
    lost = sum(max(0, due.count(x) - took.count(x)) for x in set(due))
    twice = sum(max(0, took.count(x) - due.count(x)) for x in set(due))
    skipped = sum(len(x["data"]["samples"]) for x in arm.of("samples_skipped"))
    odd = [x for x in arm.of("failure_detected") if x["data"]["cause"] == "diverged"]
    return {
        "samples_lost": [lost + size * (arm.info["steps"] - last)],
        "samples_duplicated": [twice],
        "samples_skipped": [skipped],
        "replicas_diverged": [len(odd)],
    }


def _unexplained(arm: Arm) -> int:
    """These runs hit, and could be alarmed of, ranks alone."""
    hit = [(x["time_ns"], x["data"]["target"]["rank"]) for x in arm.of("fault_injected")]
    return sum(
        not any(at <= x["time_ns"] and x["data"]["rank"] in (None, rank) for at, rank in hit)
        for x in arm.of("health_alarm")
    )


def _of_incidents(arm: Arm, ideal: float) -> dict[str, list[float]]:
    found = defaultdict[str, list[float]](list)
    faults = [*arm.of("fault_injected"), {"time_ns": math.inf}]
    for fault, following in itertools.pairwise(faults):
        injected = fault["time_ns"]
        failures = arm.of("failure_detected")
        failure = next(x for x in failures if injected <= x["time_ns"] < following["time_ns"])
        detected, failed = failure["time_ns"], failure["generation"]
        high = max(step for number, step in arm.commits if number <= failed)
        new = [
            key
            for key in arm.commits
            if key[0] > failed and key[1] > high and arm.committed(key) < math.inf
        ]
        first = min(new, key=arm.committed)
        t_new = arm.committed(first)
        restored = min(s for n, s in arm.resumed.items() if failed < n <= first[0])

        parked = [x["time_ns"] for x in arm.of("survivors_parked") if detected <= x["time_ns"]]
        decided = [x["time_ns"] for x in arm.of("decision") if detected <= x["time_ns"]]
        again = [arm.committed(key) for key in arm.commits if key[1] == high and key[0] > failed]
        marks = [detected, min(parked or decided or [detected])]
        marks += [arm.grouped[first[0]], arm.stated[first[0]]]
        marks += [max(again) if again and restored < high else marks[-1]]
        for at in range(1, len(marks)):
            marks[at] = min(max(marks[at], marks[at - 1]), t_new)
        names = ("abort_time", "regroup_time", "restore_time", "redo_time")
        for name, (begin, end) in zip(names, itertools.pairwise(marks), strict=True):
            found[name].append((end - begin) / 1e9)

        found["detection_time"].append((detected - injected) / 1e9)
        found["recovery_time"].append((t_new - injected) / 1e9)
        found["failure_cost"].append(
            (arm.info["ranks"] + arm.info["spares"]) * (t_new - injected) / 1e9 / 3600
        )
        found["steps_lost"].append(max(0, high - restored))
        found["time_to_full_rate"] += _full_rate(arm, injected, first[1], ideal)
        found["time_to_redundancy"] += _whole(arm, injected)
    return found


def _full_rate(arm: Arm, injected: int, first: int, ideal: float) -> list[float]:
    left = [key for key in arm.lineage if key[1] >= first and arm.committed(key) > injected]
    rates = [arm.samples(key) / arm.net(key) for key in left]
    for at in range(len(left) - 4):
        if median(rates[at : at + 5]) >= 0.9 * arm.info["global_batch"] / ideal:
            return [(arm.committed(left[at]) - injected) / 1e9]
    return [math.inf] if len(left) >= 5 else []


def _whole(arm: Arm, injected: int) -> list[float]:
    since = min(at for n, at in arm.ready.items() if arm.began[n] > injected)
    moments = sorted({*arm.ready.values(), *(x["time_ns"] for x in arm.of("process_ready"))})
    spares = 0 if arm.info.get("observed") else arm.info["spares"]
    for at in (moment for moment in moments if moment >= since):
        members = arm.members[max(n for n, began in arm.began.items() if began <= at)]

        def named(*kinds: str, at: int = at) -> set[str]:
            return {x["data"]["process"] for x in arm.of(*kinds) if x["time_ns"] <= at}

        waiting = named("process_ready") - named("process_exited", "failure_detected")
        if len(members) >= arm.info["ranks"] and len(waiting - {*members}) >= spares:
            return [(at - injected) / 1e9]

    def all_of(*kinds: str) -> set[str]:
        return {line["data"]["process"] for line in arm.of(*kinds)}

    starting = all_of("process_spawned") - all_of("process_ready", "failure_detected")
    return [] if starting else [math.inf]


def with_values(found: Mapping[str, list[float]]) -> dict[str, list[float]]:
    return {name: values for name, values in found.items() if values}


Both = Callable[[str], tuple[dict[str, list[float]], dict[str, list[float]]]]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    """The values of a run: the product's, and those by definition, of metrics that have some."""
    folder = tmp_path_factory.mktemp("runs")

    @cache
    def computed(name: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        faulted, control = arms(name, folder)
        made = measure(read_log(faulted), read_log(control)).values
        defined = by_definition(Arm(faulted), Arm(control))
        return with_values(made), with_values(defined)

    return computed


@pytest.mark.parametrize("name", RUNS)
def test_a_metric_is_what_its_definition_says(name: str, both: Both) -> None:
    made, defined = both(name)
    assert made.keys() == defined.keys()
    for metric, values in defined.items():
        assert made[metric] == pytest.approx(values, rel=1e-9, abs=1e-9), metric


def test_every_metric_has_values_in_some_run(both: Both) -> None:
    covered = {metric for name in RUNS for metric in both(name)[0]}
    assert covered == {*METRICS} - NOT_COVERED
