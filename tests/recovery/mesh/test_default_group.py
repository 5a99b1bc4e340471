"""``torch.distributed`` in the loop of a script: one group for life, another size when ranks are
lost.
"""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.running import supervised
from trainchaos import recovery
from trainchaos.chaos.events.log import Kind
from trainchaos.recovery.collectives.lasting import objects
from trainchaos.recovery.collectives.lasting.job_mesh import JobGroups, is_a_jobs
from trainchaos.recovery.collectives.lost import GenerationLost
from trainchaos.recovery.policy.mesh import Mesh

STEPS = 12
LOST_AT = 5

SCRIPT = f"""
import json, os, signal, torch, torch.distributed as dist
from trainchaos import recovery
from trainchaos.recovery.collectives.lost import GenerationLost

job = recovery.join(samples=64, steps={STEPS}, global_batch=6, seed=3)
torch.manual_seed(job.seed)
model = torch.nn.Linear(3, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
seen, held, said = [], set(), []

def refused(call):
    try:
        call()
    except (TypeError, RuntimeError) as error:
        said.append(str(error))

while job.running():
    held.add(id(dist.group.WORLD))
    with job.step() as step:
        x = torch.stack([torch.tensor([i, 1.0, i % 3]) / 64 for i in step.samples])
        step.backward(model(x).square().sum())
        step.commit()
    with job.busy("metric"):
        if job.generation == 1 and job.rank == 1 and job.done == {LOST_AT}:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.barrier()
        seen.append((job.done, int(total), job.world, dist.get_world_size(), dist.get_rank()))
    if job.done == {STEPS}:
        refused(lambda: dist.all_gather_object([None] * job.world, {{"loss": refused}}))
        refused(lambda: dist.new_group([job.rank]))
        refused(lambda: dist.new_group([job.rank], backend="gloo"))
        refused(lambda: dist.init_device_mesh("cpu", (job.world,)))
try:
    with job.busy("after the loop"):
        dist.all_reduce(torch.ones(1))
except GenerationLost as error:
    said.append(str(error))
name = f"{{os.getpid()}}.json"
with open(name, "w") as stream:
    json.dump([seen, len(held), said], stream)
"""


@pytest.mark.real
def test_the_default_group_is_one_for_life_and_follows_the_ranks(tmp_path: Path) -> None:
    options = ("--ranks", "3", "--strategy", "drop-replica")
    job = tmp_path / "job"
    supervised(job, SCRIPT, *options)
    everyone = [json.loads(path.read_text()) for path in job.glob("*.json")]
    assert all("or the job is over" in said[-1] for _, _, said in everyone)
    # a replacement may have been ready as the last step was done
    found = [one for one in everyone if one[0]]
    assert len(found) >= 2
    sizes = set()
    for seen, groups, said in found:
        assert groups == 1
        for _, total, world, size, rank in seen:
            assert total == world == size
            assert 0 <= rank < size
            sizes.add(size)
        assert len(said) == 5
        assert "all_gather_object: the object['loss'] is a function: send numbers" in said[0]
        assert all("outside the job's mesh" in text for text in said[1:4])
    assert sizes >= {2, 3}
    longest = max((seen for seen, _, _ in found), key=len)
    steps = [step for step, *_ in longest]
    assert steps == sorted(steps) and {1, STEPS} <= set(steps)


OBJECTS = """
import json, os, torch, torch.distributed as dist
from trainchaos import recovery

job = recovery.join(samples=64, steps=2, global_batch=6)
model = torch.nn.Linear(1, 1)
job.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
while job.running():
    with job.step() as step:
        step.backward(model(torch.ones(len(step.samples), 1)).sum())
        step.commit()
    with job.busy("evaluation"):
        me = dist.get_rank()
        mine = {"rank": me, "at": (me, "x" * 10**me), "bad": float("nan")}
        mine["w"] = torch.full((2,), float(me))
        every = [None] * job.world
        dist.all_gather_object(every, mine)
        assert [(one["rank"], one["at"]) for one in every] == [
            (n, (n, "x" * 10**n)) for n in range(3)
        ]
        assert all(one["bad"] != one["bad"] and one["w"].tolist() == [n, n]
                   for n, one in enumerate(every))
        told = [{"lr": 0.1}, "go"] if me == 1 else [None, None]
        dist.broadcast_object_list(told, src=1)
        kept = [None] * job.world if me == 2 else None
        dist.gather_object({me: "of" * me}, kept, dst=2)
        part = [None]
        dist.scatter_object_list(part, [["a"], [], ["ccc"]] if me == 0 else None, src=0)
        rows = [torch.empty(2) for _ in range(3)] if me == 0 else None
        dist.gather(torch.tensor([me, 1.0]), rows, dst=0)
        own = torch.empty(1, requires_grad=True)
        parts = torch.nn.Parameter(torch.arange(3) * 10.0).chunk(3)
        dist.scatter(own, list(parts) if me == 2 else None, src=2)
        rows = rows and [row.tolist() for row in rows]
        with open(f"{me}.json", "w") as stream:
            json.dump([told, kept and [*map(str, kept)], part, rows, own.tolist()], stream)
"""


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ([{"a": Path("x")}], r"the object\[0\]\['a'\] is a PosixPath: send numbers"),
        ({(1, Kind.BUSY): 1}, r"a key of the object\[1\] is a Kind"),
        (defaultdict(int), "the object is a defaultdict"),
    ],
    ids=["path", "enum", "subclass"],
)
def test_an_object_that_would_arrive_as_another_is_refused(value: Any, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        objects._to_tensor(value, "cpu", None)


@pytest.mark.parametrize(
    "form",
    [
        "[" * 100_000,
        '{"!tensor": ["float32", [3], "AAAA"]}',
        '{"!enum": "x"}',
        '{"!numpy": ["O", ""]}',
    ],
    ids=["deep", "tensor", "enum", "numpy"],
)
def test_what_is_no_object_of_a_job_is_an_error(form: str) -> None:
    raw = torch.frombuffer(bytearray(form.encode()), dtype=torch.uint8)
    with pytest.raises(ValueError):
        objects._to_object(raw, torch.tensor(raw.numel()), None)


@pytest.mark.long
@pytest.mark.real
def test_ranks_exchange_objects_gather_and_scatter(tmp_path: Path) -> None:
    job = tmp_path / "job"
    supervised(job, OBJECTS, "--ranks", "3")
    found = [json.loads((job / f"{rank}.json").read_text()) for rank in range(3)]
    assert [told for told, *_ in found] == [[{"lr": 0.1}, "go"]] * 3
    assert [kept for _, kept, *_ in found] == [None, None, ["{0: ''}", "{1: 'of'}", "{2: 'ofof'}"]]
    assert [part for _, _, part, *_ in found] == [[["a"]], [[]], [["ccc"]]]
    assert [rows for *_, rows, _ in found] == [[[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]], None, None]
    assert [own for *_, own in found] == [[0.0], [10.0], [20.0]]


@pytest.mark.long
@pytest.mark.real
def test_a_spare_that_was_in_no_generation_hears_after_the_loop_that_the_job_is_over(
    tmp_path: Path,
) -> None:
    options = ("--ranks", "2", "--strategy", "hot-spare", "--spares", "2")
    supervised(tmp_path / "job", SCRIPT, *options)
    ends = [json.loads(path.read_text()) for path in (tmp_path / "job").glob("*.json")]
    assert any(not seen for seen, *_ in ends), "one took the lost rank's place, the other waited"
    assert all("or the job is over" in said[-1] for _, _, said in ends)


def test_what_torch_is_taught_holds_as_long_as_the_default_group_is_a_jobs() -> None:
    """Other code of the process, such as a test after this one, has torch's own meshes again."""
    if is_a_jobs():  # of a job without a supervisor that an error ended
        dist.destroy_process_group()
    reducer: Any = None
    groups = JobGroups(
        Mesh(tensor=2),
        1,
        rank=3,
        world=4,
        reducer=reducer,
        device="cpu",
    )
    try:
        assert groups.mesh["tensor"].get_local_rank() == 1 and dist.get_rank() == 3
        with pytest.raises(RuntimeError, match="outside the job's mesh"):
            dist.init_device_mesh("cpu", (4,))
        with pytest.raises(RuntimeError, match="in no generation"):
            dist.all_reduce(torch.ones(1))
        groups.end()  # of a replacement that was ready as the job ended
        with pytest.raises(GenerationLost, match="or the job is over"):
            dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.init_device_mesh("cpu", (1,)).get_local_rank() == 0
        assert dist.device_mesh.get_rank() == 0
        said: list[Any] = [None]
        dist.all_gather_object(said, {"what": "a pickle of its own"})
        assert said == [{"what": "a pickle of its own"}]
    finally:
        dist.destroy_process_group()


def test_each_of_two_jobs_without_a_supervisor_has_a_default_group_of_its_own() -> None:
    for _ in range(2):
        job = recovery.join(samples=4, steps=1, global_batch=2)
        model = torch.nn.Linear(1, 1)
        job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        while job.running():
            with job.step() as step:
                step.backward(model(torch.ones(2, 1)).sum())
                step.commit()
            with job.busy("metric"):
                dist.all_reduce(total := torch.ones(1))
            assert float(total) == 1 and job.mesh.get_group("replicate").size() == 1
        assert not dist.is_initialized()


def test_a_job_after_one_that_an_error_ended_has_a_default_group_of_its_own() -> None:
    """As in a notebook, where a cell is run again."""
    groups = []
    for fails in (True, False):
        job = recovery.join(samples=4, steps=1, global_batch=2)
        model = torch.nn.Linear(1, 1)
        job.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            while job.running():
                groups.append(dist.group.WORLD)
                with job.step() as step:
                    step.backward(model(torch.ones(2, 1)).sum() / (0 if fails else 1))
                    1 / (0 if fails else 1)
                    step.commit()
    assert groups[0] is not groups[1]
