"""Drafts the scenario of a command: reads it, watches it, decides, writes and loads the text.

Everything but the scenario lies in a directory of its own that is removed at the end.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainchaos.chaos.errors import (
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    ChaosError,
    InfrastructureError,
    ScenarioError,
)
from trainchaos.chaos.scenario.model import Cell, RecoverySpec, Scenario, WorkloadSpec
from trainchaos.harness.draft import text
from trainchaos.harness.draft.command import (
    GROUP,
    Command,
    behind,
    command_of,
    name_of,
    plain_name,
    read_scripts,
)
from trainchaos.harness.draft.files import places
from trainchaos.harness.draft.findings import MISSING, Facts, decide
from trainchaos.harness.draft.progress import Proposal, as_printed, log_of_steps, named, propose
from trainchaos.harness.draft.watch import Sighting, Watch
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launch.workload import DataInfo
from trainchaos.harness.run import heal, interrupts
from trainchaos.harness.script import outcome_text
from trainchaos.harness.script.listen.errors import telling_error
from trainchaos.harness.script.processes.environment import (
    PreparedCommand,
    prepare,
    refuse_unstartable,
)
from trainchaos.recovery.supervise.supervision import StopFlag

ARM = "watch"
ENOUGH_STEPS = 12
LONG_ENOUGH_S = 10.0
"""How long steps are watched, so that checkpoints are written."""
SHOWN_LINES = 8
NOMINAL_STEPS = 100


class WatchStopped(ChaosError):
    """A signal ended the watch."""

    def __init__(self, signum: int) -> None:
        super().__init__("no scenario was written")
        self.exit_code = EXIT_TERMINATED if signum == signal.SIGTERM else EXIT_INTERRUPTED


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """A scenario to be written. ``seconds``: how long the command was watched."""

    facts: Facts
    written: text.ScenarioText
    seconds: float

    @property
    def again(self) -> str:
        """The next command, where it finds what this one did not; else ""."""
        return next((one.again for one in self.facts.findings if one.again), "")

    @property
    def needs(self) -> list[str]:
        """What a run cannot do without and a person has to fill in."""
        return [one.name for one in self.facts.findings if one.state == MISSING]


def draft(
    words: Sequence[str],
    *,
    named: Path | None,
    directory: Path,
    env: Mapping[str, str],
    for_s: float,
    steps: int | None,
    check: Callable[[Path], object],
) -> Drafted:
    """Watch a command in a directory and draft its scenario. ``named``: the file to write, if a
    person has named one: the scenario is called by it; ``check``: loads a scenario file, and raises
    ScenarioError.

    Raises ScenarioError if the command cannot be started or fails, WatchStopped after a signal.
    """
    script = read_scripts(words, directory)
    target = named or target_of(words, directory)
    command = command_of(words, env, script, steps)
    with _folder() as name:
        folder = Path(name)
        seen = _watched(command, folder, directory, for_s, steps)
        command = behind(command, seen.ran)
        proposal = _proposed(seen, command, directory, steps)
        _refuse_failed(seen, proposal)
        facts = decide(command, seen, proposal, directory, steps)
        called = name_of(words, script) if named is None else plain_name(named.stem)
        place = os.path.relpath(directory, target.absolute().parent)
        written = text.write(facts, called, directory=place)
        trial = folder / "scenario.yaml"
        trial.write_text(written.text)
        check(trial)
    return Drafted(facts=facts, written=written, seconds=seen.seconds)


def target_of(words: Sequence[str], directory: Path) -> Path:
    """The file that a scenario is written to by default."""
    return Path(f"chaos-{name_of(words, read_scripts(words, directory))}.yaml")


def _watched(
    command: Command, folder: Path, directory: Path, for_s: float, steps: int | None
) -> Sighting:
    run, stop = RunDirectory(folder / "run"), StopFlag()
    run.root.mkdir()
    run.make_arm(ARM)

    def enough(seen: Sighting) -> bool | None:
        found = _proposed(seen, command, directory, steps)
        if found.first_s is None:
            return None
        long = seen.seconds - found.first_s > LONG_ENOUGH_S
        # of steps that may begin again with the next epoch, one epoch says too little
        return found.distinct >= ENOUGH_STEPS and long and not found.one_epoch

    with interrupts.stop_on_signal(stop, run), heal.guarded(run) as ledger:
        prepared = _prepared(command, run, directory, steps)
        elsewhere = places([*command.words, *command.env.values()], prepared.directory)
        watch = Watch(prepared, group=command.group or GROUP, ledger=ledger, places=elsewhere)
        try:
            seen = watch.run(for_s, enough, stop)
        finally:
            watch.close()
    if stop.signum:
        raise WatchStopped(stop.signum)
    if seen.left:
        raise InfrastructureError(
            f"{seen.left} processes of the command could not be killed",
            hint="look for them by hand",
        )
    ours = run.root.absolute()
    seen.opened = {path for path in seen.opened if not path.is_relative_to(ours)}
    seen.wrote = [path for path in seen.wrote if not path.is_relative_to(ours)]
    return seen


def _proposed(seen: Sighting, command: Command, directory: Path, steps: int | None) -> Proposal:
    """How its progress is read: of what it prints, else of a file that it writes."""
    printed = propose(seen, command.frameworks, steps=steps)
    if printed.progress is not None:
        return printed
    log = log_of_steps({*seen.files, *seen.opened})
    if log is None:
        return printed
    heard = propose(as_printed(log, seen), command.frameworks, steps=steps)
    if heard.progress is None or heard.progress == "beacon":
        return printed
    name = named(log, seen, directory)
    return replace(heard, progress=heard.progress.model_copy(update={"file": name}))


def _prepared(
    command: Command, run: RunDirectory, directory: Path, steps: int | None
) -> PreparedCommand:
    """As an arm prepares it (``harness.script.processes.environment``)."""
    workload = WorkloadSpec(
        command=command.words,
        env=command.env,
        directory=str(directory),
        ranks=command.launched.ranks or 1,
        steps=steps or NOMINAL_STEPS,
    )
    scenario = Scenario(
        version=1, name="watch", workload=workload, recovery=RecoverySpec(strategy="own")
    )
    cell = Cell(id=ARM, params={}, scenario=scenario)
    refuse_unstartable(cell, "chaos init")
    data = DataInfo(path=run.root, samples=0, digest="", about="the command's own")
    return prepare(ArmSetup(id=ARM, cell=cell, repeat=0, arm="control", seed=0, run=run, data=data))


def _refuse_failed(seen: Sighting, proposal: Proposal) -> None:
    if seen.error:
        raise ScenarioError(
            f"the command could not be started: {seen.error}", hint="no scenario was written"
        )
    if seen.ended is None or seen.ended.well:
        return
    steps = [step for _, step in proposal.steps]
    when = f"after step {max(steps)}" if steps else "before any step was seen"
    lines = [line for _, line in seen.lines]
    first, _ = telling_error(lines)
    last = outcome_text.printed(lines[-SHOWN_LINES:], first) if lines else "it printed nothing"
    raise ScenarioError(
        f"the command ended with {seen.ended.how} after {seen.seconds:.1f} s, {when}; {last}",
        hint="no scenario was written: it has to train by itself first",
    )


def _folder() -> tempfile.TemporaryDirectory[str]:
    """A directory of its own, removed whatever happens."""
    try:
        return tempfile.TemporaryDirectory(prefix="chaos-init-", ignore_cleanup_errors=True)
    except OSError as error:
        raise InfrastructureError(
            f"cannot make a directory: {error.strerror}", hint="free disk space, or set TMPDIR"
        ) from error
