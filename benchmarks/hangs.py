"""How fast a hung rank is detected and replaced, for four kinds of hang and two step times.

    python -m benchmarks.hangs [--seeds 6] [--long-seeds 2] [--runs runs/bench]

Every arm has all four, with order, ranks and phases drawn from its seed. A hang must be declared
within 8 median steps, or within 0.6 s if that is longer; the steps are those before the hang in the
event log. Results mean little on a busy machine: such incidents are counted, and kept.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.harness import Tree, job, markdown, options, play
from trainchaos.chaos.events.log import Kind, Log, read_log
from trainchaos.chaos.stats import median_ci95
from trainchaos.harness.judge.measure.measure import measure
from trainchaos.harness.judge.measure.pressure import others_of, pressures_of

FACTOR, FLOOR_S, WINDOW = 8, 0.6, 50
NS = 1e9
FAMILIES: dict[str, Tree] = {
    "stopped": {"kind": "process-stop"},
    "sleeping deadlock": {"kind": "rank-hang", "params": {"how": "sleep", "hold_s": 120}},
    "spinning on the host": {"kind": "rank-hang", "params": {"how": "spin", "hold_s": 120}},
    "kernel that does not end": {"kind": "rank-hang", "params": {"how": "kernel", "hold_s": 120}},
}
LOOKED_AT_S = 10.0
OWN_WAIT, LEAST_WAIT, MOST_STEAL, MOST_WANTED = 1.5, 0.3, 0.05, 0.1
"""Limits beyond which a machine counts as shared with other work: how much longer ranks wait for
processors than they would because of each other, as a factor and in absolute terms; time taken by
the hypervisor; and the share of a silence in which some task waits for a processor.
"""


@dataclass(frozen=True, kw_only=True)
class HangPace:
    """``batch``: global, which makes a step short or long; ``first``, ``gap``, ``last``: steps
    before the first hang, between two, and after the last.
    """

    batch: int
    first: int
    gap: int
    last: int


PACES = {
    "short": HangPace(batch=16, first=15, gap=25, last=5),
    "long": HangPace(batch=640, first=14, gap=7, last=6),
}


@dataclass(frozen=True, kw_only=True)
class MeasuredHang:
    """One hang. ``step_s``: the median step before it; ``busy``: other activity of the machine
    meanwhile, if any.
    """

    family: str
    detection_s: float
    recovery_s: float
    step_s: float
    busy: str

    @property
    def bound_s(self) -> float:
        """Time limit for its declaration."""
        return max(FLOOR_S, FACTOR * self.step_s)


def scenario(seed: int, pace: HangPace) -> Tree:
    """All families, one after the other."""
    draw = random.Random(seed)
    faults = []
    for number, family in enumerate(draw.sample(list(FAMILIES), len(FAMILIES))):
        phase = draw.choice(("forward", "backward"))
        at = {"step": pace.first + number * pace.gap, "phase": phase}
        where = {"target": {"role": "worker", "select": "one"}, "at": at}
        faults.append({"id": family.replace(" ", "-"), **FAMILIES[family], **where})
    return job(
        "bench-hangs",
        seed,
        steps=pace.first + (len(FAMILIES) - 1) * pace.gap + pace.last,
        recovery="hot-spare",
        workload={"global_batch": pace.batch, "checkpoint": {"every": 20}},
        faults=faults,
        stop_conditions=[{"when": "no_committed_step_for > 90s"}],
    )


def found_in(log: Log) -> list[MeasuredHang]:
    """The hangs of an arm, in order."""
    families = {family.replace(" ", "-"): family for family in FAMILIES}
    acts = {event.data["fault"]: event.time_ns for event in log.of(Kind.FAULT_INJECTED)}
    found = []
    for incident in measure(log, None).incidents:
        injected_ns = acts.get(incident.fault)
        if injected_ns is None:
            continue
        detection_s = math.inf if incident.detection_time is None else incident.detection_time
        until_ns = injected_ns + int(min(detection_s, 60.0) * NS)
        found.append(
            MeasuredHang(
                family=families.get(incident.fault, incident.fault),
                detection_s=detection_s,
                recovery_s=math.inf if incident.recovery_time is None else incident.recovery_time,
                step_s=step_before(log, injected_ns),
                busy=busy(log, injected_ns, until_ns),
            )
        )
    return found


def step_before(log: Log, before_ns: int) -> float:
    """Median duration of the last steps finished by all ranks before a time, from consecutive steps
    of one generation.
    """
    done: dict[tuple[int, int], int] = {}
    for event in log.of(Kind.STEP_COMMITTED):
        if event.time_ns < before_ns and event.step is not None:
            key = (event.generation, event.step)
            done[key] = max(done.get(key, 0), event.time_ns)
    pairs = itertools.pairwise(sorted(done))
    took = [done[b] - done[a] for a, b in pairs if b == (a[0], a[1] + 1)]
    return median(took[-WINDOW:]) / NS if took else 0.0


def busy(log: Log, since_ns: int, until_ns: int) -> str:
    """Other activity of the machine while a rank was silent, and shortly before; "":
    none recorded.
    """
    first_ns = min((event.time_ns for event in log.of(Kind.PRESSURE_READ)), default=since_ns)
    pressure = pressures_of(log, max(first_ns, since_ns - int(LOOKED_AT_S * NS)), until_ns).get(0)
    started = log.first(Kind.RUN_STARTED)
    if pressure is not None and started is not None:
        own = max(0.0, started.data["ranks"] / pressure.cpus - 1)
        if pressure.wait > OWN_WAIT * own + LEAST_WAIT:
            return f"ranks waited {pressure.wait:.1f} s for each second that they ran"
        if pressure.steal > MOST_STEAL:
            return f"{pressure.steal:.0%} of the processors' time were stolen"
    wanted_s, silent_s = _wanted(log, since_ns, until_ns), (until_ns - since_ns) / NS
    if wanted_s > MOST_WANTED * silent_s:
        return f"tasks waited for a processor during at least {wanted_s:.2f} of {silent_s:.2f} s"
    others = others_of(log)
    return f"other programs used {others:.1f} processors" if others is not None else ""


def _wanted(log: Log, since_ns: int, until_ns: int) -> float:
    """Minimum time of a silence in which some task waited for a processor, without the time of
    training ranks, which always do.
    """
    readings = [event for event in log.of(Kind.PRESSURE_READ) if event.data["some_s"] is not None]
    before = [event for event in readings if event.time_ns <= since_ns]
    after = [event for event in readings if event.time_ns >= until_ns]
    if not before or not after:
        return 0.0
    first, last = before[-1], after[0]
    trained_s = (last.time_ns - first.time_ns - (until_ns - since_ns)) / NS
    return max(0.0, float(last.data["some_s"] - first.data["some_s"]) - trained_s)


def table(found: Mapping[str, Sequence[MeasuredHang]]) -> str:
    """A row for each family and step time. ``found``: by step time, in words."""
    head = ["a rank", "median step", "n", "declared after, s", "new step after, s", "bound, s"]
    rows = []
    for hangs, family in itertools.product(found.values(), FAMILIES):
        if not (ours := [hang for hang in hangs if hang.family == family]):
            continue
        bounds = [f"{hang.bound_s:.2f}" for hang in sorted(ours, key=lambda hang: hang.bound_s)]
        within = sum(hang.detection_s <= hang.bound_s for hang in ours)
        rows.append(
            [
                family,
                f"{1e3 * median(hang.step_s for hang in ours):.0f} ms",
                len(ours),
                _spread([hang.detection_s for hang in ours]),
                _spread([hang.recovery_s for hang in ours]),
                " to ".join(dict.fromkeys((bounds[0], bounds[-1]))),
                f"{within} of {len(ours)}",
                sum(bool(hang.busy) for hang in ours),
            ]
        )
    return markdown([*head, "within", "beside others"], rows)


def _spread(values: Sequence[float]) -> str:
    """Median with its 95 % interval, or with all of the values where there are too few."""
    interval = median_ci95(values)
    if interval is not None:
        return f"{median(values):.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
    return f"{median(values):.3f} (all: {', '.join(f'{value:.3f}' for value in sorted(values))})"


def main() -> None:
    """Measure and print a Markdown table."""
    parser = options(__doc__, runs="runs/bench")
    parser.add_argument("--seeds", type=int, default=6, help="arms with short steps")
    parser.add_argument("--long-seeds", type=int, default=2, help="arms with steps of a second")
    given = parser.parse_args()
    found: dict[str, list[MeasuredHang]] = {name: [] for name in PACES}
    verdicts = []
    for seed in range(max(given.seeds, given.long_seeds)):
        for name, wanted in (("short", given.seeds), ("long", given.long_seeds)):
            if seed < wanted:
                results = play(f"hangs-{name}-{seed}", scenario(seed, PACES[name]), given.runs)
                verdicts.append(results.verdict)
                run = given.runs / results.scenario / results.run_id
                for arm in results.arms:
                    found[name] += found_in(read_log(run / arm.events))
    print(table(found))
    bad = len(verdicts) - verdicts.count("pass")
    print(f"\n{len(verdicts)} arms; verdicts other than pass: {bad}")


if __name__ == "__main__":
    main()
