"""Rules for lines of training, whatever prints them: what is looked through, and which words set a
line apart from training.
"""

from __future__ import annotations

import re

from trainchaos.chaos.scenario.progress import FrameworkLines, RegexProgress

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What a terminal takes for colours and the like."""
_WORDS = r"(?:eval\w*|val(?:id\w*)?|test(?:ing)?|sanity)"
# no part of a path or of the name of a host: only a word, or the first part of a name such as
# val_loss and eval/step
_APART = re.compile(
    rf"(?<![\w./=-]){_WORDS}(?:(?=[_/-](?:global|step|iter|batch|epoch|loss))|(?![\w./=-]))",
    re.IGNORECASE,
)
_WORD = re.compile(r"\[?[A-Za-z]+[\]:,]?")
_LOSS_APART = re.compile(rf"(?<![A-Za-z]){_WORDS}(?:$|[^A-Za-z])", re.IGNORECASE)
_DIGIT = re.compile(r"\d")
_WHOLE_LOSS = re.compile(r"[+-]?(?:\d+\.(\d+)|nan|inf)", re.IGNORECASE)
_SPOILT = re.compile(
    r"grad(?:ient)?s?[ _]?norm['\"]?\s*[:=|]?\s*['\"]?[+-]?(?:nan|inf)\b", re.IGNORECASE
)


class Forms:
    """The forms of the lines of a step, of a scenario's progress. ``last``: the one that fitted the
    newest step.
    """

    def __init__(self, progress: RegexProgress) -> None:
        self.last: str | None = None
        also = progress.also if isinstance(progress, FrameworkLines) else ()
        self._patterns = [re.compile(one) for one in (progress.regex, *also)]
        self._loss = re.compile(progress.loss) if progress.loss else None
        self._skips = progress.skip is not None

    @property
    def epochs(self) -> bool:
        """Whether any of them names the epoch."""
        return any("epoch" in one.groupindex for one in self._patterns)

    def step_in(self, text: str) -> re.Match[str] | None:
        """The step in a plain line, by the first form that fits; None if there is none."""
        found = next((match for one in self._patterns if (match := one.search(text))), None)
        if found is None or self._apart(found, "step"):
            return None
        if self._skips and found.groupdict().get("loss") and loss_apart(_front(found, "loss")):
            return None
        self.last = found.re.pattern
        return found

    def loss_in(self, text: str) -> str | None:
        """The loss in a plain line of its own."""
        found = self._loss.search(text) if self._loss is not None else None
        return None if found is None or self._apart(found, "loss") else found["loss"]

    def _apart(self, found: re.Match[str], group: str) -> bool:
        front = _front(found, group)
        return self._skips and (apart(front) or (group == "loss" and loss_apart(front)))


def parted(found: re.Match[str]) -> tuple[str, str] | None:
    """The two lines that ranks wrote at once into that in which a step was found, if they did:
    where nothing is buffered, print writes the end of a line by itself, and another rank's line may
    come before it. That begins as the first does, but for digits, and its loss has as many
    decimals: else the first may have been cut in its loss.
    """
    text, front, begins = found.string, found.string[: found.start()], found.start("loss")
    second = found.re.search(text, begins)
    cut = second.start() - len(front) if second is not None else 0
    if (
        second is None
        or cut <= begins
        or _DIGIT.sub("0", text[cut : second.start()]) != _DIGIT.sub("0", front)
    ):
        return None
    mine = _WHOLE_LOSS.fullmatch(text, begins, cut)
    other = _WHOLE_LOSS.match(text, second.start("loss"))
    if mine is None or other is None or len(mine[1] or "") != len(other[1] or ""):
        return None
    return text[:cut], text[cut:]


def _front(found: re.Match[str], group: str) -> str:
    return found.string[: found.start(group)]


def plain(line: str) -> str:
    """A line as a person reads it."""
    return ESCAPES.sub("", line) if "\x1b" in line else line


def spoilt(line: str) -> bool:
    """Whether a line says that the norm of the gradients is no number."""
    return _SPOILT.search(line) is not None


def apart(front: str) -> bool:
    """Whether what stands in front of a step says that it is one of an evaluation."""
    return _APART.search(front) is not None


def loss_apart(front: str) -> bool:
    """Whether the words before a loss, or what it is a part of, say that it is no training loss:
    ``val loss``, ``eval/c4/CrossEntropyLoss``.
    """
    before, name = ["", "", *front.split()][-2:]
    said = f"{before} {name}" if _WORD.fullmatch(before) else name
    return _LOSS_APART.search(said) is not None
