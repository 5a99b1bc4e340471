"""NVIDIA Resiliency Extension's restart agent sits an exam: each log of a paper is told as the text
that a training job prints, and what the agent makes of it becomes our answers.

The agent is asked by its documented command, without a model behind it
(nvidia.github.io/nvidia-resiliency-ext/attribution/features/restart-agent.html, version 0.7.0). It
names one failure, or none, with its class, its rank and its line, and decides RESTART or STOP; it
names no layer and no action, which are taken from its class and its decision.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.attribution.exam import CATALOGUE, ExamError
from trainchaos.chaos.events.event import Event
from trainchaos.chaos.events.kinds import Kind
from trainchaos.chaos.events.log import Log
from trainchaos.harness.explain.diagnosis import DiagnosedIncident
from trainchaos.recovery.playbook.entry import Action

TOOL = "nvidia-resiliency-ext restart agent, no model"
MODULE = "nvidia_resiliency_ext.attribution.restart_agent.cli"
SCHEMA = "restart_agent_response.v1"
LIMIT_S = 60.0
_SAID = {
    Kind.STEP_COMMITTED: "iteration {step} | loss {loss}",
    Kind.ERROR_RAISED: "{type}: {message}",
    Kind.NONFINITE_CAUGHT: "non-finite {what}",
    Kind.CHECKPOINT_FAILED: "saving {checkpoint} failed: {error}",
    Kind.CHECKPOINT_REFUSED: "checkpoint {checkpoint} refused: {reason}",
    Kind.CHECKPOINT_COMMITTED: "saved checkpoint {checkpoint}",
}
"""What a rank prints of these events."""


def ask(python: Path, question: str, log: Log) -> list[DiagnosedIncident]:
    """The agent's answer to a question. ``python``: of an environment that has it. Raises
    ExamError.
    """
    lines, at_s = text_of(log)
    with tempfile.TemporaryDirectory(prefix="nvrx-") as folder:
        text = Path(folder) / "training.log"
        text.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        about = ["--job-id", question, "--cycle-id", "0", "--disable-l1"]
        command = [str(python), "-m", MODULE, str(text), *about]
        try:
            ran = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=True
            )
            return answer_of(json.loads(ran.stdout), at_s)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            words = getattr(error, "stderr", None) or b""
            said = words.decode(errors="replace").strip()[-200:] or str(error)
            raise ExamError(
                f"{question}: the restart agent gave no result: {said}",
                hint="docs/attribution.md says how to install it",
            ) from error


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
        if line := _line(event, ranks):
            yield event.time_ns, line


def _line(event: Event, ranks: Mapping[str, int]) -> str:
    data = event.data
    if event.kind is Kind.PROCESS_EXITED and not data["expected"]:
        end = f"signal {data['signal']}" if data["signal"] else f"code {data['exit_code']}"
        name = " (segmentation fault)" if data["signal"] == 11 else ""
        rank = ranks.get(str(data["process"]))
        return f"launcher: rank {rank} (pid {data['pid']}) exited with {end}{name}"
    if event.kind not in _SAID or (event.kind is Kind.STEP_COMMITTED and data["rank"] != 0):
        return ""
    said = _SAID[event.kind].format(step=event.step, **data)
    return f"[rank{ranks.get(event.actor, 0)}]: {_flat(said)}"


def _flat(text: object) -> str:
    return " ".join(str(text).split())


def answer_of(result: Any, at_s: Sequence[float]) -> list[DiagnosedIncident]:
    """The incident that a result names; none where it names none. ``at_s``: time of each line of
    the text. Raises ValueError for a result of another schema.
    """
    if not isinstance(result, dict) or result.get("schema_version") != SCHEMA:
        raise ValueError(f"the result is not of schema {SCHEMA}")
    failure = result.get("primary_failure") or result.get("selected_observed_failure")
    if not failure:
        return []
    name, line, rank = str(failure.get("failure_class")), failure.get("line"), failure.get("rank")
    cause, layer = CATALOGUE.nvrx.get(name, CATALOGUE.nvrx["others"])
    known = isinstance(line, int) and 1 <= line <= len(at_s)
    stop = result.get("decision") == "STOP"
    return [
        DiagnosedIncident(
            at_s=at_s[line - 1] if known else max(at_s, default=0.0),
            cause=cause,
            rank=int(rank) if str(rank).isdecimal() else None,
            layer=layer,
            action=Action.FIX_CODE if stop else Action.RESTART,
            why=f"{name}, {result.get('decision')}: {_flat(result.get('justification'))}"[:500],
        )
    ]
