"""Progress output and final reports of ``chaos compare``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.say import say

if TYPE_CHECKING:
    from trainchaos.harness.compare.plan.directory import ComparisonPlan, Directory
    from trainchaos.harness.compare.play import ArmProgress
    from trainchaos.harness.compare.result.model import Comparison


@dataclass(kw_only=True)
class Progress:
    """Prints one line for each arm played."""

    directory: Directory
    plan: ComparisonPlan
    quiet: bool

    def __call__(self, step: ArmProgress) -> None:
        if self.quiet:
            return
        played = step.played
        words = [
            f"[{step.number}/{step.total}]",
            played.arm.label,
            "·",
            played.arm.family or "no fault",
        ]
        words += [f"· seed {played.arm.seed}:", self._told(step)]
        words += [f"· {_duration(step.left_s)} left"] if step.number < step.total else []
        say(" ".join(words))

    def _told(self, step: ArmProgress) -> str:
        from trainchaos.harness.compare.result.gather import seen_of

        if not step.played.usable:
            return f"{step.results.verdict}, to be played again: {step.results.reason}"
        return seen_of(self.directory, self.plan, step.played)


def announced(directory: Directory, plan: ComparisonPlan) -> str:
    """What the comparison will run, and how long it will take."""
    from trainchaos.harness.compare.play import left_of

    missing, seconds, guessed = left_of(directory, plan)
    faulted = sum(1 for arm in plan.arms if arm.family is not None)
    lines = [
        (
            f"{plan.name}: {len(plan.stacks)} stacks, {len(plan.families)} fault families,"
            f" {len(plan.seeds)} seeds"
        ),
        f"  stacks    {', '.join(stack.label for stack in plan.stacks)}",
        f"  families  {', '.join(family.name for family in plan.families)}",
        f"  against   {plan.reference}",
        (
            f"  arms      {len(plan.arms)}: {faulted} with a fault, {len(plan.arms) - faulted}"
            " controls"
        ),
    ]
    for stack in plan.stacks:
        lines += [
            f"  without   {stack.label} under {name}: {why}"
            for name, why in stack.not_offered.items()
        ]
    lines += [f"  without   {label}: {why}" for label, why in plan.skipped.items()]
    lines += [f"  changed   {change}" for change in plan.changes]
    done = len(plan.arms) - len(missing)
    sure = "measured" if not guessed else "a guess" if guessed == len(missing) else "partly a guess"
    longest = f"; each job that never recovers takes {plan.deadline:g} s more"
    lines.append(
        f"  time      {_duration(seconds)} for {len(missing)} arms"
        f" ({sure}){longest if guessed else ''}"
    )
    return "\n".join(
        [
            *lines,
            *([f"  done      {done} of {len(plan.arms)}"] if done else []),
            f"  place     {directory.root}",
        ]
    )


def _duration(seconds: float) -> str:
    return f"about {seconds / 60:.0f} min" if seconds >= 90 else f"about {seconds:.0f} s"


def write_report(made: Comparison, target: Path, *, quiet: bool) -> None:
    """Write all reports of a comparison into a directory and print their paths. Raises
    InfrastructureError.
    """
    from trainchaos.reports.compare import write_all

    for caution in made.cautions:
        say(f"not alike: {caution}", err=True)
    try:
        target.mkdir(parents=True, exist_ok=True)
        paths = write_all(made, target)
    except OSError as error:
        raise errors.InfrastructureError(
            f"cannot write the report to {target}: {error.strerror}", hint="free disk space"
        ) from error
    for path in paths if not quiet else ():
        say(str(path))


def write_archive(directory: Directory, target: Path) -> None:
    """Pack a comparison into a ``.tar.xz``, and print its size."""
    from trainchaos.harness.compare.result.archive import pack

    say(f"{pack(directory, target)} ({target.stat().st_size / 2**20:.2f} MiB)")
