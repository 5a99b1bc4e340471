"""Derives regular expressions for steps and losses from the lines that a command printed.

A step is a number that grows by a constant from line to line, with a word such as "step" or "iter"
beside it, in lines of one shape. A loss is a number behind the word "loss". Expressions are made as
short as they can be without matching anything else, so that they outlive a change of the lines.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAST = 3
"""Different steps that make a progression."""
STEADY = 0.7
"""Share of the gaps between steps that must be the usual one."""
LONGEST_LINE = 1000
NEAR = 12  # characters between the word and its number
_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NUMBER = re.compile(
    r"(?<![\d.])(?:[-+](?=[\d.]))?(?:\d[\d,_]*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE
)
_NAN = re.compile(r"(?<![A-Za-z])[-+]?(?:nan|inf)(?![A-Za-z])", re.IGNORECASE)
_WHOLE = re.compile(r"\d[\d,_]*")
_WORDS = (
    (r"global[ _-]?steps?|steps?", 4),
    (r"iterations?|iters?", 3),
    (r"its?|updates?|batch(?:es)?", 2),
    (r"epochs?|rounds?", 1),
)
"""Words beside a step, and how well each fits."""
SURE = 3
"""Words that fit so well stand beside nothing but steps."""
SURE_WITH_LOSS = 2
"""With a loss in the same line, so do these."""
_BEFORE = [
    (re.compile(rf"(?:^|(?<=[^A-Za-z]))(?:{word})[^A-Za-z0-9]{{0,{NEAR}}}$", re.I), rank)
    for word, rank in _WORDS
]
_AFTER = [(re.compile(rf"^[ _-]?(?:{word})(?![A-Za-z/])", re.I), rank) for word, rank in _WORDS]
_EPOCH = re.compile(rf"(?:^|(?<=[^A-Za-z]))epochs?[^A-Za-z0-9]{{0,{NEAR}}}$", re.I)
_LOSS = re.compile(
    rf"(?P<word>(?:[A-Za-z]+[_/])?loss[^A-Za-z0-9+\-.]{{0,{NEAR}}})(?:[a-z_][\w.]*\()?$", re.I
)
_TOTAL = re.compile(r"\s*(?:/|of)\s*(\d[\d,_]*)")
_VALUE = r"[^\s,;|)\]}]+"


@dataclass(frozen=True, kw_only=True)
class Token:
    """A number in a line. ``start``, ``end``: its place; ``before``: the text in front of it since
    the last number; ``after``: the text behind it.
    """

    text: str
    start: int
    end: int
    before: str
    after: str

    @property
    def whole(self) -> int | None:
        """Its value as a count, or None."""
        return int(re.sub("[,_]", "", self.text)) if _WHOLE.fullmatch(self.text) else None


@dataclass(frozen=True, kw_only=True)
class Derived:
    """``regex``: for steps, and for losses in the same line; ``loss``: for losses in lines of their
    own, or None; ``total``: that the lines state behind the step (``5/60``); ``epochs``: the step
    begins anew in each epoch; ``counted``: the expression finds the epoch as well; ``one_epoch``:
    an epoch is beside the step, and it is the same one in all lines; ``steps``: how many different
    ones there are; ``sure``: the word beside them says that they are steps, or a weaker word and
    a loss in the same line do.
    """

    regex: str
    loss: str | None
    total: int | None
    epochs: bool = False
    counted: bool = False
    one_epoch: bool = False
    steps: int = 0
    sure: bool = False

    def certain(self, steps: int) -> bool:
        """Whether these are the steps of a job of so many: by the words beside them, or because
        the lines state that number.
        """
        return self.sure or (self.total == steps and not self.epochs)


def derive(lines: Iterable[str]) -> Derived | None:
    """The best expression for these lines, or None if no number looks like a step."""
    texts = [_plain(line) for line in lines]
    shapes: dict[str, list[tuple[str, list[Token]]]] = defaultdict(list)
    for text in texts:
        tokens = list(tokens_of(text))
        if tokens:
            shapes[_shape(text, tokens)].append((text, tokens))
    best: tuple[tuple[int, int], _Column] | None = None
    for rows in shapes.values():
        for column in _columns(rows):
            rated = (column.rank, len(column.steps))
            if best is None or rated > best[0]:
                best = rated, column
    return None if best is None else _expression(best[1], texts)


def tokens_of(text: str) -> Iterator[Token]:
    """The numbers of a line, ``nan`` and ``inf`` included."""
    found = sorted([*_NUMBER.finditer(text), *_NAN.finditer(text)], key=lambda match: match.start())
    last = 0
    for match in found:
        yield Token(
            text=match[0],
            start=match.start(),
            end=match.end(),
            before=text[last : match.start()],
            after=text[match.end() :],
        )
        last = match.end()


@dataclass(frozen=True, kw_only=True)
class _Column:
    """The number at one place of all lines of a shape, where it is a step."""

    index: int
    rank: int
    rows: Sequence[tuple[str, list[Token]]]
    steps: list[int]
    again: bool


def _columns(rows: Sequence[tuple[str, list[Token]]]) -> Iterator[_Column]:
    for index in range(len(rows[0][1])):
        token = rows[0][1][index]
        rank = _named(token)
        values = [tokens[index].whole for _, tokens in rows]
        steps = [value for value in values if value is not None]
        if not rank or len(steps) < len(values):
            continue
        again = begins_again(steps)
        if grows(steps[: steps.index(max(steps)) + 1] if again else steps):
            yield _Column(index=index, rank=rank, rows=rows, steps=steps, again=again)


def _named(token: Token) -> int:
    """How well the words beside a number fit a step; 0: not at all."""
    before = next((rank for word, rank in _BEFORE if word.search(token.before)), 0)
    after = next((rank for word, rank in _AFTER if word.search(token.after)), 0)
    return before or after or int(_TOTAL.match(token.after) is not None)


def grows(values: Sequence[int]) -> bool:
    """Whether these grow by a constant. Several ranks may print each, one after the other; of a
    stretch of lines that is missing, only the gap is unusual.
    """
    first = list(dict.fromkeys(values))
    if len(first) < LEAST:
        return False
    gaps = [after - before for before, after in pairwise(first)]
    usual, count = Counter(gaps).most_common(1)[0]
    return usual > 0 and count >= STEADY * len(gaps) and min(gaps) > 0


def begins_again(values: Sequence[int]) -> bool:
    """Whether these go back to where they began, as the steps of epochs do."""
    low = high = values[0]
    for value in values:
        if value <= low and high - low >= LEAST - 1:
            return True
        high = max(high, value)
    return False


def _expression(column: _Column, texts: Sequence[str]) -> Derived:
    text, tokens = column.rows[0]
    token = tokens[column.index]
    total = _TOTAL.match(token.after)
    epoch = _epoch(column) if column.again else None
    loss = _loss_in(column)
    regexes = [
        _joined(head, token, tokens, epoch, loss, total is not None)
        for head in _heads(text, tokens, column.index)
    ]
    whole = rf"^{_heads(text, tokens, column.index)[-1]}"
    regexes.append(_joined(whole, token, tokens, epoch, loss, total is not None))
    regex = next((one for one in regexes if _only(column, _steps_of(one, texts))), regexes[-1])
    return Derived(
        regex=regex,
        loss=None if loss else _loss_alone(texts),
        total=None if total is None else int(re.sub("[,_]", "", total[1])),
        epochs=column.again,
        counted=epoch is not None,
        one_epoch=_one_epoch(column),
        steps=len(set(column.steps)),
        sure=column.rank >= (SURE_WITH_LOSS if loss else SURE),
    )


def _only(column: _Column, found: list[int]) -> bool:
    """Whether an expression finds the steps of a column, and besides them at most other steps of
    the same progression, as in lines with a word more.
    """
    if found == column.steps:
        return True
    more = set(column.steps) <= set(found) and not column.again
    # steps of an evaluation, which are counted anew each time, would all be steps seen before
    return more and not begins_again(found) and grows(found)


def _heads(text: str, tokens: Sequence[Token], index: int) -> list[str]:
    """Expressions for what stands before the step: from the word alone to the whole line."""
    token = tokens[index]
    before = token.before
    short = next((m[0] for word, _ in _BEFORE if (m := word.search(before))), "")
    heads = [_literal(short)] if short else []
    heads.append(_literal(before))
    whole = ""
    for one in tokens[:index]:
        whole += _literal(one.before) + r"\S+?"
    heads.append(whole + _literal(before))
    if heads[0][:1].isalpha():
        heads[0] = rf"(?<![A-Za-z]){heads[0]}"
    return heads


def _joined(
    head: str,
    token: Token,
    tokens: Sequence[Token],
    epoch: Token | None,
    loss: Token | None,
    stated: bool,
) -> str:
    step = head + r"(?P<step>\d[\d,_]*)"
    if not any(word.search(token.before) for word, _ in _BEFORE):
        behind = next((m[0] for word, _ in _AFTER if (m := word.search(token.after))), "")
        fraction = _TOTAL.match(token.after)
        step += _literal(behind) or (r"\s*(?:/|of)\s*\d" if fraction else r"\b")
    if epoch is not None:
        step += r"\s*(?:/|of)\s*(?P<of>\d[\d,_]*)" if stated else ""
        word = _EPOCH.search(epoch.before)
        front = _literal(word[0] if word else epoch.before) + r"(?P<epoch>\d+)"
        step = f"{front}.*?{step}" if epoch.start < token.start else f"{step}.*?{front}"
    if loss is None:
        return step
    word = _LOSS.search(loss.before)
    value = f"{_literal(word['word'] if word else loss.before)}(?P<loss>{_VALUE})"
    return f"{value}.*?{step}" if loss.start < token.start else f"{step}.*?{value}"


def _literal(text: str) -> str:
    """An expression for a text, whatever the number of its blanks."""
    parts = re.split(r"(\s+)", text)
    return "".join(r"\s*" if part.isspace() else re.escape(part) for part in parts if part)


def _epoch(column: _Column) -> Token | None:
    """The epoch in the same line, if it never goes back."""
    for index, token in enumerate(column.rows[0][1]):
        if index == column.index or not _EPOCH.search(token.before):
            continue
        values = [tokens[index].whole for _, tokens in column.rows]
        known = [value for value in values if value is not None]
        if len(known) == len(values) and known == sorted(known):
            return token
    return None


def _one_epoch(column: _Column) -> bool:
    """Whether an epoch is beside the step and did not change, so that the step may begin anew. A
    step that is called global does not.
    """
    tokens = column.rows[0][1]
    if "global" in tokens[column.index].before.lower():
        return False
    places = [
        index
        for index, one in enumerate(tokens)
        if index != column.index and _EPOCH.search(one.before)
    ]
    return len({row[index].text for _, row in column.rows for index in places}) == 1


def _loss_in(column: _Column) -> Token | None:
    """The loss in the line of the step: the first one, the training loss before that of an
    evaluation.
    """
    tokens = column.rows[0][1]
    found = [one for i, one in enumerate(tokens) if i != column.index and _LOSS.search(one.before)]
    plain = [one for one in found if not re.search(r"val|eval|test", one.before, re.I)]
    return next(iter(plain or found), None)


def _loss_alone(texts: Sequence[str]) -> str | None:
    """An expression for losses in lines of their own, if there are at least two."""
    words: Counter[str] = Counter()
    for text in texts:
        for token in tokens_of(text):
            word = _LOSS.search(token.before)
            if word and not re.search(r"val|eval|test", token.before, re.I):
                words[word["word"]] += 1
    if not words or words.most_common(1)[0][1] < 2:
        return None
    return rf"{_literal(words.most_common(1)[0][0])}(?P<loss>{_VALUE})"


def _steps_of(regex: str, texts: Sequence[str]) -> list[int]:
    pattern = re.compile(regex)
    found = (pattern.search(text) for text in texts)
    return [int(re.sub("[,_]", "", match["step"])) for match in found if match]


def _plain(line: str) -> str:
    return _ESCAPES.sub("", line)[:LONGEST_LINE]


def _shape(text: str, tokens: Sequence[Token]) -> str:
    """The line without its numbers, so that lines of one print have one shape."""
    parts, last = [], 0
    for token in tokens:
        parts.append(text[last : token.start].strip())
        last = token.end
    return "\0".join([*parts, text[last:].strip()])
