"""NVIDIA Resiliency Extension's restart agent sits an exam: each log of a paper is told as the text
that a training job prints, and what the agent makes of it becomes our JSON.

``python -m trainchaos.harness.attribute.nvrx PAPER --python PYTHON > answers.json``

The agent is asked by its documented command, without a model behind it
(nvidia.github.io/nvidia-resiliency-ext/attribution/features/restart-agent.html, version 0.7.0):
``python -m nvidia_resiliency_ext.attribution.restart_agent.cli LOG --job-id .. --cycle-id ..
--disable-l1`` prints a result of the schema ``restart_agent_response.v1``. It names one failure, or
none, with its class, its rank and its line, and decides RESTART or STOP; it names no layer and no
action, which are taken from its class and its decision.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainchaos.chaos.errors import EXIT_USAGE, ChaosError
from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log, read_log
from trainchaos.harness.attribute.paper import MANIFEST
from trainchaos.harness.explain.diagnosis import CauseClass as C
from trainchaos.harness.explain.diagnosis import DiagnosedIncident, Diagnosis, Layer
from trainchaos.recovery.playbook.entry import Action

MODULE = "nvidia_resiliency_ext.attribution.restart_agent.cli"
SCHEMA = "restart_agent_response.v1"
LIMIT_S = 60.0
CLASSES: Mapping[str, tuple[C, Layer]] = MappingProxyType(
    {
        "gpu_hardware_fault": (C.DEVICE, Layer.HARDWARE),
        "peer_gpu_memory_access_failure": (C.DEVICE, Layer.HARDWARE),
        "infra_policy_event": (C.PREEMPTION, Layer.SYSTEM),
        "time_limit": (C.PREEMPTION, Layer.SYSTEM),
        "user_cancelled": (C.PREEMPTION, Layer.SYSTEM),
        "observed_exception": (C.CODE, Layer.APPLICATION),
        "configuration_validation_failure": (C.CODE, Layer.APPLICATION),
        "argument_validation_failure": (C.CODE, Layer.APPLICATION),
        "shape_mismatch": (C.CODE, Layer.APPLICATION),
        "framework_crash": (C.CODE, Layer.APPLICATION),
        "checkpoint_compatibility_mismatch": (C.STORAGE, Layer.STORAGE),
        "artifact_or_path_not_found": (C.STORAGE, Layer.STORAGE),
        "filesystem_permission_denied": (C.STORAGE, Layer.STORAGE),
        "cuda_oom": (C.MEMORY, Layer.APPLICATION),
        "linux_oom_kill_confirmation": (C.MEMORY, Layer.SYSTEM),
        "nan_or_inf": (C.NONFINITE, Layer.APPLICATION),
        "bad_token_or_window": (C.DATA, Layer.APPLICATION),
        "observed_distributed_operation_timeout": (C.HANG, Layer.APPLICATION),
        "nccl_rdma_port_error_event": (C.LINK, Layer.NETWORK),
        "nccl_cascade": (C.LINK, Layer.NETWORK),
        "terminal_transport_failure_surface": (C.LINK, Layer.NETWORK),
    }
)
"""The classes of version 0.7.0 (``restart_agent/l0/registry.py``), and what they are called here.
Others are taken for the end of a process that nothing explains.
"""
_UNKNOWN = (C.PROCESS_DEATH, Layer.SYSTEM)


class NvrxError(ChaosError):
    """The agent cannot be asked, or what it says cannot be read. Exit code 2."""

    exit_code = EXIT_USAGE


def text_of(log: Log) -> tuple[list[str], list[float]]:
    """What such a job would have printed, in order of time, and when: seconds since it began. Lines
    of ranks: steps, errors, values that are not finite, checkpoints that failed; of the launcher:
    ends of processes that it did not ask for. Nothing of what a supervisor concluded.
    """
    started = log.first(Kind.RUN_STARTED)
    start_ns = started.time_ns if started else 0
    told = sorted(_told(log), key=lambda one: one[0])
    return [line for _, line in told], [max(0.0, (ns - start_ns) / 1e9) for ns, _ in told]


def _told(log: Log) -> Iterator[tuple[int, str]]:
    ranks: dict[str, int] = {}
    for event in log.events:
        if event.kind is Kind.GENERATION_STARTED:
            ranks.update({str(name): rank for rank, name in enumerate(event.data["members"])})
        line = _line(event, ranks)
        if line:
            yield event.time_ns, line


def _line(event: Event, ranks: Mapping[str, int]) -> str:
    data, who = event.data, f"[rank{ranks.get(event.actor, 0)}]:"
    match event.kind:
        case Kind.STEP_COMMITTED if data["rank"] == 0:
            return f"{who} iteration {event.step} | loss {data['loss']}"
        case Kind.ERROR_RAISED:
            return f"{who} {data['type']}: {_flat(data['message'])}"
        case Kind.NONFINITE_CAUGHT:
            return f"{who} non-finite {_flat(data['what'])}"
        case Kind.CHECKPOINT_FAILED:
            return f"{who} saving {data['checkpoint']} failed: {_flat(data['error'])}"
        case Kind.CHECKPOINT_REFUSED:
            return f"{who} checkpoint {data['checkpoint']} refused: {_flat(data['reason'])}"
        case Kind.CHECKPOINT_COMMITTED:
            return f"{who} saved checkpoint {data['checkpoint']}"
        case Kind.PROCESS_EXITED if not data["expected"]:
            rank = ranks.get(str(data["process"]))
            end = f"signal {data['signal']}" if data["signal"] else f"code {data['exit_code']}"
            name = " (segmentation fault)" if data["signal"] == 11 else ""
            return f"launcher: rank {rank} (pid {data['pid']}) exited with {end}{name}"
    return ""


def _flat(text: object) -> str:
    return " ".join(str(text).split())


def answer_of(result: Mapping[str, Any], at_s: Sequence[float]) -> list[DiagnosedIncident]:
    """The incident that a result names; none where it names none. ``at_s``: time of each line of
    the text. Raises NvrxError for a result of another schema.
    """
    if result.get("schema_version") != SCHEMA:
        raise NvrxError(f"a result of schema {result.get('schema_version')!r}, not {SCHEMA}")
    failure = result.get("primary_failure") or result.get("selected_observed_failure")
    if not isinstance(failure, Mapping):
        return []
    name = str(failure.get("failure_class"))
    cause, layer = CLASSES.get(name, _UNKNOWN)
    line = failure.get("line")
    known = isinstance(line, int) and 1 <= line <= len(at_s)
    rank = str(failure.get("rank") or "")
    stop = result.get("decision") == "STOP"
    return [
        DiagnosedIncident(
            at_s=at_s[line - 1] if known and isinstance(line, int) else max(at_s, default=0.0),
            cause=cause,
            rank=int(rank) if rank.isdecimal() else None,
            layer=layer,
            action=Action.FIX_CODE if stop else Action.RESTART,
            why=f"{name}, {result.get('decision')}: {_flat(result.get('justification'))}"[:500],
        )
    ]


def ask(python: Path, text: Path, question: str) -> Mapping[str, Any]:
    """The agent's result for a text. ``python``: of an environment that has it. Raises
    NvrxError.
    """
    command = [str(python), "-m", MODULE, str(text), "--job-id", question, "--cycle-id", "0"]
    try:
        ran = subprocess.run(
            [*command, "--disable-l1"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=LIMIT_S,
            check=False,
        )
        if ran.returncode:
            said = ran.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
            raise NvrxError(f"{question}: exit code {ran.returncode}: {said[-1][:200]}")
        result = json.loads(ran.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, RecursionError) as error:
        raise NvrxError(
            f"{question}: the restart agent gave no result: {error}",
            hint="docs/attribution.md says how to install it",
        ) from error
    if not isinstance(result, dict):
        raise NvrxError(f"{question}: the result is no JSON object")
    return result


def sit(paper: Path, python: Path) -> Diagnosis:
    """The agent's answers to a whole paper. Raises NvrxError and LogError."""
    try:
        rows = json.loads((paper / MANIFEST).read_text(encoding="utf-8"))["questions"]
        names = [(str(row["id"]), str(row["events"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NvrxError(f"{paper / MANIFEST}: is no manifest of a paper: {error}") from error
    answers = {}
    with tempfile.TemporaryDirectory(prefix="nvrx-") as folder:
        for name, events in names:
            lines, at_s = text_of(read_log(paper / events))
            text = Path(folder) / "training.log"
            text.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            answers[name] = answer_of(ask(python, text, name), at_s)
    return Diagnosis(tool="nvidia-resiliency-ext restart agent, no model", runs=answers)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainchaos.harness.attribute.nvrx")
    parser.add_argument("paper", type=Path, help="directory of chaos attribute --export")
    parser.add_argument("--python", type=Path, required=True, help="of an environment with NVRx")
    asked = parser.parse_args(argv)
    try:
        print(sit(asked.paper, asked.python).model_dump_json(indent=1))
    except ChaosError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
