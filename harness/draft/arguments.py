"""Options in the command line of a training script: where it is told how long to train, and where
its checkpoints go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

STEPS = (
    r"(?:(?:max-|num-|n-|total-|max-train-|num-train-|train-|training-)?steps"
    r"|(?:max-|num-|train-)?iters|(?:max-|num-)?iterations|(?:max|num)-updates)"
)
"""Options for the number of steps, with dashes in place of underscores. Dots lead:
``training.steps`` counts.
"""
EPOCHS = r"(?:max-|num-|n-|num-train-|total-)?epochs"
CHECKPOINTS = (
    r"(?:out(?:put)?-?dir|save(?:-dir|-path|-folder)?|ckpts?|ckpt-(?:dir|path)"
    r"|checkpoints?|checkpoint-(?:dir|path|folder)|checkpoint\.folder|default-root-dir"
    r"|dump-folder|run-dir|project-dir|storage-path|hydra\.run\.dir)"
)
"""Options for the place of checkpoints."""
RESUME = (
    r"(?:(?:auto-)?resume|resume-(?:training|from|from-checkpoint)|init-from|load(?:-checkpoint)?)"
)
"""Options that have a script go on from a checkpoint."""
_OPTION = re.compile(r"(?:--?)?(?P<name>[A-Za-z][\w.-]*)(?:=(?P<value>.*))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An option with its value. ``index``: of the word that holds the value; ``head``: what stands
    before the value, with a blank at its end where that is a word of its own.
    """

    value: str
    index: int = 0
    head: str = ""

    @property
    def name(self) -> str:
        """Without what stands between it and its value."""
        return self.head.rstrip("= ")


def find(words: Sequence[str], names: str, value: str = r".+") -> Argument | None:
    """The last option of these names whose value matches: ``--max_steps 10``, ``--max-steps=10``,
    ``trainer.max_steps=10``. The last counts, as for argparse.
    """
    found = None
    for index, word in enumerate(words):
        option = _OPTION.fullmatch(word)
        if option is None or not among(option["name"], names):
            continue
        if option["value"] is not None:
            head = word[: len(word) - len(option["value"])]
            one = Argument(value=option["value"], index=index, head=head)
        elif word.startswith("-") and index + 1 < len(words):
            one = Argument(value=words[index + 1], index=index + 1, head=f"{word} ")
        else:
            continue
        if re.fullmatch(value, one.value):
            found = one
    return found


def declared(options: Mapping[str, str], names: str) -> Argument | None:
    """The first option of these names among those that a script declares: as it is written in front
    of a value -> its default.
    """
    return next(
        (Argument(value=value, head=head) for head, value in options.items() if among(head, names)),
        None,
    )


def added(words: Sequence[str], option: Argument, value: str) -> list[str] | None:
    """The words with an option that they lack; None if it cannot be put behind them."""
    script = any(word.endswith(".py") for word in words)
    if not script or any(re.fullmatch(r"-\w*c", word) for word in words[:2]):
        return None
    head = option.head
    return [*words, *([head.strip(), value] if head.endswith(" ") else [head + value])]


def replaced(words: Sequence[str], argument: Argument, value: str) -> list[str]:
    """The words with another value of the argument."""
    new = list(words)
    new[argument.index] = value if argument.head.endswith(" ") else argument.head + value
    return new


def number(words: Sequence[str], names: str) -> int | None:
    """The whole number that an option gives."""
    found = find(words, names, r"\d{1,12}")
    return int(found.value) if found else None


def among(name: str, names: str) -> bool:
    """Whether an option, as it is written in front of a value, is one of these (an expression)."""
    plain = name.strip("-= ").lower().replace("_", "-")
    return any(re.fullmatch(names, one) for one in (plain, plain.rpartition(".")[2]))
