"""Derives regular expressions for steps and losses from the lines that a command printed.

A step is a number that grows by a constant from line to line, with a word such as "step" or "iter"
beside it, in lines of one shape; lines of an evaluation (``rules``) are set apart before, and the
epoch is never the step. A loss is a number behind the word "loss". Expressions are made as short as
they can be without matching anything else, so that they outlive a change of the lines.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainchaos.chaos.scenario.progress import RegexProgress
from trainchaos.harness.script.listen import numbers, rules

LEAST = 3
"""Different steps that make a progression."""
STEADY = 0.7
"""Share of the gaps between steps that must be the usual one."""
LONGEST_LINE = 1000
NEAR = 12  # characters between the word and its number
_NUMBER = re.compile(
    r"(?<![\d.])(?:[-+](?=[\d.]))?(?:\d[\d,_]*(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?"
    r"|(?<![A-Za-z])[-+]?(?:nan|inf)(?:\.0*)?(?![A-Za-z])",
    re.IGNORECASE,
)
_MOST = 10**12
_WORDS = (
    (r"global[ _-]?steps?|steps?", 4),
    (r"iterations?|iters?", 3),
    (r"its?|updates?|batch(?:es)?", 2),
    (r"rounds?", 1),
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
# of "ep 2 step 30" the word belongs to the number behind it
_AFTER = [
    (re.compile(rf"^[ _-]?(?:{word})(?![A-Za-z/])(?![ :=#\[]{{0,3}}\d)", re.I), rank)
    for word, rank in _WORDS
]
_EPOCH = re.compile(rf"(?:^|(?<=[^A-Za-z]))ep(?:och)?s?[^A-Za-z0-9]{{0,{NEAR}}}$", re.I)
_LOSS = re.compile(
    rf"(?P<word>(?:[A-Za-z]+[_/]|train(?:ing)? )?loss(?:[ _/]train)?[^A-Za-z0-9+\-.]{{0,{NEAR}}})"
    r"(?:[a-z_][\w.]*\()?$",
    re.I,
)
_TOTAL = re.compile(r"\s*(?:/|of)\s*(\d[\d,_]*|\?)")
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
        """Its value as a count, or None: a share, as ``5%``, is none."""
        return None if self.after[:1] == "%" else numbers.whole(self.text, _MOST)


@dataclass(frozen=True, kw_only=True)
class Derived:
    """``regex``: for steps, and for losses in the same line; ``loss``: for losses in lines of their
    own, or None; ``total``: that the lines state behind the step (``5/60``); ``epochs``: the step
    begins anew in each epoch; ``counted``: the expression finds the epoch as well; ``one_epoch``:
    an epoch is beside the step, and it is the same one in all lines; ``steps``: how many different
    ones there are, and ``last`` of them; ``sure``: the word beside them says that they are steps,
    or a weaker word and a loss in the same line do.
    """

    regex: str
    loss: str | None
    total: int | None
    epochs: bool = False
    counted: bool = False
    one_epoch: bool = False
    steps: int = 0
    last: int = 0
    sure: bool = False

    @property
    def shown(self) -> str:
        """As a person may write it in a scenario."""
        loss = f", loss: {quoted(self.loss)}" if self.loss else ""
        return f"progress: {{regex: {quoted(self.regex)}{loss}}}"

    @property
    def progress(self) -> RegexProgress:
        """As a scenario says it."""
        return RegexProgress(regex=self.regex, loss=self.loss, skip="evaluation")

    def certain(self, steps: int) -> bool:
        """Whether these are the steps of a job of so many: by the words beside them, or because
        the lines state that number.
        """
        return self.sure or (self.total == steps and not self.epochs)


def derive(lines: Iterable[str]) -> Derived | None:
    """The best expression for these lines, or None if no number looks like a step."""
    texts = [rules.plain(line)[:LONGEST_LINE] for line in lines]
    shapes: dict[str, list[tuple[str, list[Token]]]] = defaultdict(list)
    for text in texts:
        tokens = list(tokens_of(text))
        if tokens:
            shapes[_shape(text, tokens)].append((text, tokens))
    columns = [column for rows in shapes.values() for column in _columns(rows)]
    best = max(columns, key=_rated, default=None)
    return None if best is None else _expression(best, texts)


def tokens_of(text: str) -> Iterator[Token]:
    """The numbers of a line, ``nan`` and ``inf`` included."""
    last = 0
    for match in _NUMBER.finditer(text):
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
    """The number at one place of all lines of a shape, where it is a step. ``again``: it begins
    again; ``epoch``: the epoch in the same lines, if it does; ``loss``: the training loss there.
    """

    index: int
    rank: int
    rows: Sequence[tuple[str, list[Token]]]
    steps: list[int]
    again: bool
    epoch: Token | None
    loss: Token | None

    @property
    def token(self) -> Token:
        """The number in the first line."""
        return self.rows[0][1][self.index]


def _columns(rows: Sequence[tuple[str, list[Token]]]) -> list[_Column]:
    text, tokens = rows[0]
    losses = [one for one in tokens if _LOSS.search(one.before)]
    training = [one for one in losses if not rules.loss_apart(_front(text, one))]
    if losses and not training:
        return []  # of an evaluation
    found = []
    for index, token in enumerate(tokens):
        rank, total = _named(token), _total(token)
        values = [tokens[index].whole for _, tokens in rows]
        steps = [value for value in values if value is not None]
        if not rank or len(steps) < len(values) or rules.apart(text[: token.start]):
            continue
        again = begins_again(steps)
        if grows(steps[: steps.index(max(steps)) + 1] if again else steps):
            epoch = _epoch(index, rows, steps) if again else None
            # what begins again before its total is another run in the same log, not another epoch
            whole = total is None or max(steps) >= total - usual_gap(steps)
            column = _Column(
                index=index,
                rank=rank,
                rows=rows,
                steps=steps,
                again=epoch is not None or (again and whole),
                epoch=epoch,
                loss=next((one for one in training if one is not token), None),
            )
            found.append(column)
    epochs = [one.epoch for one in found]
    return [one for one in found if one.token not in epochs]


def _rated(one: _Column) -> tuple[bool, bool, int, int]:
    """How well a column fits: a step of the run before one of an unknown epoch, one with a loss
    before one without.
    """
    known = not one.again or one.epoch is not None
    return known, one.loss is not None, one.rank, len(one.steps)


def _front(text: str, token: Token) -> str:
    """What stands in front of a loss: its name."""
    return re.sub(r"[^A-Za-z]*(?:[a-z_][\w.]*\()?$", "", text[: token.start])


def _total(token: Token) -> int | None:
    total = _TOTAL.match(token.after)
    return numbers.whole(total[1], _MOST) if total else None


def usual_gap(*runs: Iterable[int]) -> int:
    """Steps from one line to the next, as is usual."""
    gaps = Counter(b - a for run in runs for a, b in pairwise(dict.fromkeys(run)) if b > a)
    return gaps.most_common(1)[0][0] if gaps else 1


def _named(token: Token) -> int:
    """How well the words beside a number fit a step; 0: not at all."""
    if _EPOCH.search(token.before):
        return 0
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
    for place, value in enumerate(values):
        far = value <= low and high - low >= LEAST - 1
        if far and not _of_another_rank(values[place:], high):
            return True
        high = max(high, value)
    return False


def _of_another_rank(values: Sequence[int], high: int) -> bool:
    """Whether these, which begin low, are of a rank that lags: the others go on beyond ``high``
    before it has come there.
    """
    come = values[0]
    for value in values:
        if value > high:
            return come < high
        come = max(come, value)
    return False


def _expression(column: _Column, texts: Sequence[str]) -> Derived:
    heads = _heads(column)
    regexes = [_joined(head, column) for head in [*heads, rf"^{heads[-1]}"]]
    regex = next((one for one in regexes if _only(column, _steps_of(one, texts))), regexes[-1])
    return Derived(
        regex=regex,
        loss=None if column.loss else _loss_alone(texts),
        total=_total(column.token),
        epochs=column.again,
        counted=column.epoch is not None,
        one_epoch=_one_epoch(column),
        steps=len(set(column.steps)),
        last=max(column.steps),
        sure=column.rank >= (SURE_WITH_LOSS if column.loss else SURE),
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


def _heads(column: _Column) -> list[str]:
    """Expressions for what stands before the step: from the word alone to the whole line."""
    before = column.token.before
    short = next((m[0] for word, _ in _BEFORE if (m := word.search(before))), "")
    others = (_literal(one.before) + r"\S+?" for one in column.rows[0][1][: column.index])
    heads = [*([_literal(short)] if short else []), _literal(before)]
    heads.append("".join(others) + _literal(before))
    if heads[0][:1].isalpha():
        heads[0] = rf"(?<![A-Za-z]){heads[0]}"
    return heads


def _joined(head: str, column: _Column) -> str:
    token, epoch, loss = column.token, column.epoch, column.loss
    powers = any("e" in tokens[column.index].text.lower() for _, tokens in column.rows)
    number = r"[\d.,_e+]+" if powers else r"\d[\d,_]*"
    step = head + rf"(?P<step>{number})"
    stated = epoch is not None and _total(token) is not None
    of = r"\s*(?:/|of)\s*(?P<of>\d[\d,_]*)" if stated else ""
    if not any(word.search(token.before) for word, _ in _BEFORE):
        behind = next((m[0] for word, _ in _AFTER if (m := word.search(token.after))), "")
        fraction = r"\s*(?:/|of)\s*[\d?]" if _TOTAL.match(token.after) else r"\b"
        step += _literal(behind) or ("" if of else fraction)
    step += of
    if epoch is not None:
        word = _EPOCH.search(epoch.before)
        front = _literal(word[0] if word else epoch.before) + r"(?P<epoch>\d+)"
        front += "" if word else r"\s*/"
        step = f"{front}.*?{step}" if epoch.start < token.start else f"{step}.*?{front}"
    if loss is None:
        return step
    word = _LOSS.search(loss.before)
    value = f"{_literal(word['word'] if word else loss.before)}(?P<loss>{_VALUE})"
    return f"{value}.*?{step}" if loss.start < token.start else f"{step}.*?{value}"


def quoted(text: str) -> str:
    """In single quotes, where a backslash is one: as expressions are read best."""
    return "'" + text.replace("'", "''") + "'"


def _literal(text: str) -> str:
    """An expression for a text, whatever the number of its blanks."""
    parts = re.split(r"(\s+)", text)
    return "".join(r"\s*" if part.isspace() else re.escape(part) for part in parts if part)


def _epoch(
    index: int, rows: Sequence[tuple[str, list[Token]]], steps: Sequence[int]
) -> Token | None:
    """The epoch in the same line: called so, and it never goes back; or a number of a total that
    grows whenever the step begins again.
    """
    for place, token in enumerate(rows[0][1]):
        named = _EPOCH.search(token.before) is not None
        if place == index or not (named or (place < index and _total(token) is not None)):
            continue
        values = [tokens[place].whole for _, tokens in rows]
        known = [value for value in values if value is not None]
        if len(known) < len(values) or known != sorted(known):
            continue
        turns = zip(pairwise(steps), pairwise(known), strict=True)
        if known[0] < known[-1] and (
            named or all((b < a) == (epoch > last) for (a, b), (last, epoch) in turns)
        ):
            return token
    return None


def _one_epoch(column: _Column) -> bool:
    """Whether an epoch is beside the step and did not change, so that the step may begin anew. A
    step that is called global does not.
    """
    if "global" in column.token.before.lower():
        return False
    tokens = column.rows[0][1]
    places = [n for n, one in enumerate(tokens) if n != column.index and _EPOCH.search(one.before)]
    return len({row[index].text for _, row in column.rows for index in places}) == 1


def _loss_alone(texts: Sequence[str]) -> str | None:
    """An expression for losses in lines of their own, if there are at least two."""
    words: Counter[str] = Counter()
    for text in texts:
        for token in tokens_of(text):
            word = _LOSS.search(token.before)
            front = _front(text, token)
            if word and not (rules.apart(front) or rules.loss_apart(front)):
                words[word["word"]] += 1
    if not words or words.most_common(1)[0][1] < 2:
        return None
    return rf"{_literal(words.most_common(1)[0][0])}(?P<loss>{_VALUE})"


def _steps_of(regex: str, texts: Sequence[str]) -> list[int]:
    pattern = re.compile(regex)
    found = (match for text in texts if (match := pattern.search(text)))
    steps = (
        numbers.whole(match["step"], _MOST)
        for match in found
        if not rules.apart(match.string[: match.start("step")])
    )
    return [step for step in steps if step is not None]


def _shape(text: str, tokens: Sequence[Token]) -> str:
    """The line without its numbers, so that lines of one print have one shape."""
    parts, last = [], 0
    for token in tokens:
        parts.append(text[last : token.start].strip())
        last = token.end
    return "\0".join([*parts, text[last:].strip()])
