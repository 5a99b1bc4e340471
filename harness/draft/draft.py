"""Drafts the scenario of a command: recognises it, watches it, decides, writes and loads the text.

Everything but the scenario lies in a directory of its own that is removed at the end.
"""

from __future__ import annotations

import os
import re
import shlex
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
from trainchaos.harness.draft import frameworks, launchers, text
from trainchaos.harness.draft.decide import decide
from trainchaos.harness.draft.facts import FAULTS, Command, Facts, command_of
from trainchaos.harness.draft.progress import Proposal, propose
from trainchaos.harness.draft.watching.changes import places
from trainchaos.harness.draft.watching.logs import as_printed, log_of_steps, named
from trainchaos.harness.draft.watching.watch import Ran, Sighting, Watch
from trainchaos.harness.host.rundir import RunDirectory
from trainchaos.harness.launch.launcher import ArmSetup
from trainchaos.harness.launch.workload import DataInfo
from trainchaos.harness.run import heal, interrupts
from trainchaos.harness.script import outcome_text
from trainchaos.harness.script.check import refuse_unstartable
from trainchaos.harness.script.listen.errors import telling_error
from trainchaos.harness.script.processes.environment import PreparedCommand, prepare
from trainchaos.recovery.supervise.supervision import StopFlag

ARM = "watch"
ENOUGH_STEPS = 12
LONG_ENOUGH_S = 10.0
"""How long steps are watched in which no checkpoint was written yet."""
SHOWN_LINES = 8
NOMINAL_STEPS = 100
_INSTALLED = ("site-packages", "dist-packages", "lib/python")
"""In the paths of scripts that are no user's."""


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
    def arms(self) -> int:
        """Arms of a run: of each fault, one with it and one without."""
        return 2 * FAULTS

    @property
    def run_s(self) -> tuple[float, float] | None:
        """How long a run takes, at least and if each recovery takes long; None if that is not
        known.
        """
        arm_s = self.facts.arm_s
        if arm_s is None:
            return None
        return arm_s * self.arms, arm_s * self.arms + self.facts.recoveries_s

    @property
    def again(self) -> str:
        """The next command, where it finds what this one did not; else ""."""
        return next((one.again for one in self.facts.findings if one.again), "")

    @property
    def needs(self) -> list[str]:
        """What a run cannot do without and a person has to fill in."""
        return [one.name for one in self.facts.findings if one.needed]


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
    script = frameworks.read_scripts(words, directory)
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
    script = frameworks.read_scripts(words, directory)
    return Path(f"chaos-{name_of(words, script)}.yaml")


def name_of(words: Sequence[str], script: frameworks.ScriptText) -> str:
    """Name of the scenario: that of the script, or else of the program."""
    return plain_name(script.name or Path(words[0]).name)


def plain_name(stem: str) -> str:
    """The stem of a file as a scenario may be called."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")
    return plain[:60] or "job"


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
        watched_s = seen.seconds - found.first_s
        saved = bool(seen.saved) or watched_s > LONG_ENOUGH_S
        # of steps that may begin again with the next epoch, one epoch says too little
        return found.distinct >= ENOUGH_STEPS and saved and not found.one_epoch

    with interrupts.stop_on_signal(stop, run), heal.guarded(run) as ledger:
        prepared = _prepared(command, run, directory, steps)
        named = places([*command.words, *command.env.values()], prepared.directory)
        watch = Watch(
            prepared, group=command.group or frameworks.GROUP, ledger=ledger, places=named
        )
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
    return seen


def _proposed(seen: Sighting, command: Command, directory: Path, steps: int | None) -> Proposal:
    """How its progress is read: of what it prints, else of a file that it writes."""
    found = propose(seen, command.frameworks, steps=steps)
    if found.progress is not None:
        return found
    written = {*seen.files, *seen.opened, *seen.after.since(seen.before)}
    log = log_of_steps(path for path in written if path.is_file())
    if log is None:
        return found
    heard = propose(as_printed(log[0], seen), command.frameworks, steps=steps)
    if heard.progress is None or heard.progress == "beacon":
        return found
    name = named(log[0], seen, directory)
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
    first, _ = telling_error([line for _, line in seen.lines])
    lines = outcome_text.printed(seen.last[-SHOWN_LINES:], first) if seen.last else ""
    raise ScenarioError(
        f"the command ended with {seen.ended.how} after {seen.seconds:.1f} s, {when}"
        + f"; {lines or 'it printed nothing'}",
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


def behind(command: Command, ran: Ran) -> Command:
    """The command, with the launcher, the frameworks and the arguments of what it started: they
    decide as much as if the user had typed them.
    """
    texts = [command.script]
    inner: list[str] = []
    launched = command.launched
    for words, place in ran.items():
        plain = _without_interpreter(words)
        own = [word for word in words if not any(part in word for part in _INSTALLED)]
        script = frameworks.read_scripts(own, place)
        if script.name and script.text not in [one.text for one in texts]:
            texts.append(script)
        inner += plain if script.name else ()
        if launched.kind is None or not (launched.kind.ranks or launched.kind.note):
            one = launchers.recognise(plain)
            if one.kind is not None and one.kind.ranks:
                launched = replace(one, by=shlex.join(command.words[:2]))
    script = frameworks.ScriptText(
        name=command.script.name, text="\n".join(one.text for one in texts)
    )
    known = frameworks.recognise([*command.words, *inner], script)
    return replace(
        command,
        launched=launched,
        frameworks=known,
        script=script,
        inner=inner,
        env=launched.env(known) | command.env,
    )


def _without_interpreter(words: tuple[str, ...]) -> list[str]:
    """``torchrun ...`` of ``python /bin/torchrun ...``, as the kernel says of a script."""
    program = Path(words[0]).name
    script = len(words) > 1 and not words[1].startswith("-") and Path(words[1]).suffix == ""
    return list(words[1:] if program.startswith(("python", "pypy")) and script else words)
