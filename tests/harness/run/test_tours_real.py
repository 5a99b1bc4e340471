"""Tours: many kinds of faults, one after the other, in one job of real processes, each found by its
detector and recovered from. Other strategies, phases and models are in ``make test-all``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.decided import decided, unpassed
from trainchaos.harness.judge.results import Results

pytestmark = pytest.mark.real

PROCESSES = """
workload: {kind: mlp, ranks: 4, steps: 185, global_batch: 16, determinism: default, verify_every: 5,
           checkpoint: {every: 20}}
recovery: {strategy: hot-spare, spares: 2}
faults:
  - {id: segv, kind: process-segv, target: {rank: 1}, at: {step: 12, phase: backward},
     expect: {detected_by: exit, blame: rank}}
  - {id: raise, kind: exception, target: {rank: 2}, at: {step: 27, phase: forward},
     expect: {detected_by: exit, blame: rank}}
  - {id: stop, kind: process-stop, target: {rank: 3}, at: {step: 42, phase: optimizer},
     expect: {detected_by: hang, blame: rank}}
  - {id: spin, kind: rank-hang, params: {how: spin, hold_s: 120}, target: {rank: 0},
     at: {step: 57, phase: forward}, expect: {detected_by: hang, blame: rank}}
  - {id: skip, kind: collective-skip, target: {rank: 1}, at: {step: 72},
     expect: {detected_by: hang, blame: rank}}
  - {id: nan, kind: tensor-corrupt, params: {surface: gradient, op: nan}, target: {rank: 2},
     at: {step: 87}, expect: {detected_by: nonfinite, blame: rank}}
  - {id: drift, kind: replica-desync, params: {amount: 0.001}, target: {rank: 3}, at: {step: 102},
     expect: {detected_by: diverged, blame: rank}}
  - {id: notice, kind: process-term, params: {grace_s: 60}, target: {rank: 0}, at: {step: 117},
     expect: {detected_by: notice}}
  - {id: spare, kind: spare-kill, at: {step: 132}, expect: {outcome: masked}}
  - {id: store, kind: store-kill, at: {step: 147}, expect: {outcome: masked}}
  - {id: coordinator, kind: coordinator-kill, params: {down_s: 0.2}, at: {step: 157},
     expect: {outcome: masked}}
  - {id: kill, kind: process-kill, target: {rank: 1}, at: {step: 180, phase: backward},
     expect: {detected_by: exit, blame: rank}}
"""
STORAGE = """
workload: {kind: mlp, ranks: 2, steps: 70, global_batch: 16, determinism: default,
           checkpoint: {every: 10, keep: 3}}
recovery: checkpoint-restart
faults:
  - {id: torn, kind: checkpoint-corrupt, params: {mode: torn, stage: manifest},
     target: {checkpoint: latest}, at: {step: 15}, expect: {detected_by: exit}}
  - {id: rot, kind: checkpoint-corrupt, params: {mode: bitflip}, target: {checkpoint: latest},
     at: {step: 32, phase: forward}}
  - {id: after-rot, kind: process-kill, target: {rank: 1}, at: {step: 35, phase: backward}}
  - {id: full, kind: disk-full, params: {by: ballast, size_mib: 64}, at: {step: 43},
     duration: {steps: 15}}
  - {id: after-full, kind: process-kill, target: {rank: 0}, at: {step: 55, phase: backward}}
"""
SLOWNESS = """
workload: {kind: mlp, ranks: 4, steps: 70, global_batch: 16, determinism: default,
           checkpoint: {every: 20}}
recovery: drop-replica
faults:
  - {id: link, kind: link-throttle, params: {mbit_per_s: 2, method: links}, target: {rank: 1},
     at: {step: 8}, duration: {steps: 12}, expect: {outcome: masked}}
  - {id: data, kind: data-stall, params: {delay_s: 20ms}, target: {rank: 2}, at: {step: 24},
     duration: {steps: 5}, expect: {outcome: masked}}
  - {id: saves, kind: io-slow, params: {delay_s: 20ms}, target: {rank: 0}, at: {step: 36},
     duration: {steps: 10}, expect: {outcome: masked}}
  - {id: kill, kind: process-kill, target: {rank: 3}, at: {step: 55, phase: collective},
     expect: {detected_by: exit, blame: rank}}
"""
TOURS = {"processes": PROCESSES, "storage": STORAGE, "slowness": SLOWNESS}


@pytest.mark.parametrize("tour", TOURS)
def test_each_fault_of_a_tour_lands_and_the_job_goes_on(tmp_path: Path, tour: str) -> None:
    path = tmp_path / "tour.yaml"
    head = f"version: 1\nname: {tour}\nseed: 5\n"
    stop = 'stop_conditions: [{when: "no_committed_step_for > 120s"}]\n'
    path.write_text(head + TOURS[tour] + stop)
    code = decided(path, tmp_path / "runs", ("-q",))
    text = (tmp_path / "runs" / tour / "latest" / "results.json").read_text()
    results = Results.model_validate_json(text)
    assert unpassed(results) == {}
    assert code == 0, results.reason
    planned = [line.split()[2].rstrip(",") for line in TOURS[tour].splitlines() if "{id: " in line]
    hit = {incident.fault: incident for incident in results.faults}
    assert sorted(hit) == sorted(planned)
    assert all(incident.landed and incident.healed for incident in hit.values())
