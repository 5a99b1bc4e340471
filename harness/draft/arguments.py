"""Options in the command line of a training script: where it is told how long to train, and where
its checkpoints go.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

STEPS = frozenset(
    {
        "steps",
        "max-steps",
        "num-steps",
        "n-steps",
        "total-steps",
        "train-steps",
        "training-steps",
        "max-train-steps",
        "num-train-steps",
        "max-iters",
        "train-iters",
        "num-iters",
        "iters",
        "iterations",
        "num-iterations",
        "max-iterations",
        "num-updates",
        "max-updates",
    }
)
"""Options for the number of steps; a new one is one line. Dots lead: ``training.steps`` counts."""

EPOCHS = frozenset(
    {"epochs", "max-epochs", "num-epochs", "n-epochs", "num-train-epochs", "total-epochs"}
)
"""Options for the number of epochs."""

CHECKPOINTS = frozenset(
    {
        "output-dir",
        "out-dir",
        "outdir",
        "save",
        "save-dir",
        "save-path",
        "save-folder",
        "ckpt",
        "ckpts",
        "ckpt-dir",
        "ckpt-path",
        "checkpoint",
        "checkpoints",
        "checkpoint-dir",
        "checkpoint-path",
        "checkpoint-folder",
        "checkpoint.folder",
        "default-root-dir",
        "dump-folder",
        "run-dir",
        "project-dir",
        "storage-path",
        "hydra.run.dir",
    }
)
"""Options for the place of checkpoints; a new one is one line."""

RESUME = frozenset(
    {
        "resume",
        "auto-resume",
        "resume-training",
        "resume-from",
        "resume-from-checkpoint",
        "init-from",
        "load",
        "load-checkpoint",
    }
)
"""Options that have a script go on from a checkpoint; a new one is one line."""

_OPTION = re.compile(r"(?:--?)?(?P<name>[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An option with its value. ``index``: of the word that holds the value; ``head``: what stands
    before the value in that word.
    """

    name: str
    value: str
    index: int
    head: str = ""


def find(words: Sequence[str], names: Collection[str], value: str = r".+") -> Argument | None:
    """The last option of these names whose value matches: ``--max_steps 10``, ``--max-steps=10``,
    ``trainer.max_steps=10``. The last counts, as for argparse.
    """
    found = None
    for index, word in enumerate(words):
        option = _OPTION.fullmatch(word)
        if option is None or not _among(option["name"], names):
            continue
        if option["value"] is not None:
            head = word[: len(word) - len(option["value"])]
            one = Argument(name=head.rstrip("="), value=option["value"], index=index, head=head)
        elif word.startswith("-") and index + 1 < len(words):
            one = Argument(name=word, value=words[index + 1], index=index + 1)
        else:
            continue
        if re.fullmatch(value, one.value):
            found = one
    return found


def declared(options: Mapping[str, str], names: Collection[str]) -> Argument | None:
    """The first option of these names among those that a script declares: as it is written in front
    of a value -> its default.
    """
    for head, default in options.items():
        if _among(head.strip("-= "), names):
            return Argument(name=head.rstrip("= "), value=default, index=0, head=head)
    return None


def added(words: Sequence[str], option: Argument, value: str) -> list[str] | None:
    """The words with an option that they lack; None if it cannot be put behind them."""
    script = next((word for word in words if word.endswith(".py")), None)
    if script is None or any(re.fullmatch(r"-\w*c", word) for word in words[:2]):
        return None
    head = option.head
    return [*words, *([head.strip(), value] if head.endswith(" ") else [head + value])]


def replaced(words: Sequence[str], argument: Argument, value: str) -> list[str]:
    """The words with another value of the argument."""
    new = list(words)
    new[argument.index] = argument.head + value
    return new


def number(words: Sequence[str], names: Collection[str]) -> int | None:
    """The whole number that an option gives."""
    found = find(words, names, r"\d{1,12}")
    return int(found.value) if found else None


def names(name: str, known: Collection[str]) -> bool:
    """Whether an option, as it is written in front of a value, is one of these."""
    return _among(name.strip("-= "), known)


def _among(name: str, names: Collection[str]) -> bool:
    plain = name.lower().replace("_", "-")
    return plain in names or plain.rpartition(".")[2] in names
