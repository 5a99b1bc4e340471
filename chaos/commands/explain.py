"""``chaos explain``: what a sign of failure means and what to do about it, from the playbook."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import click
from click.shell_completion import CompletionItem

from trainchaos.chaos import errors
from trainchaos.chaos.commands.shared.options import FORMAT, RUN
from trainchaos.chaos.commands.shared.say import say, tell

if TYPE_CHECKING:
    from trainchaos.recovery.detection.ras import RasFinding
    from trainchaos.recovery.playbook.book import Playbook
    from trainchaos.recovery.playbook.entry import Entry

NUMBERS = ("xid", "sxid", "signal", "exit")
TEXT = "text"
RAS = "ras"
MOST_RANKS = 20  # said of an answer of NCCL's RAS; --format json has all
STANDARD_INPUT = "-"
HANG = 10  # columns before what is folded
MOST_AT_ONCE = 1 << 20  # bytes of a line; a longer one is read as several
MOST_LINES = 1_000_000  # of an answer of NCCL's RAS
LOOKED_AT = 1 << 16  # bytes at the beginning of a file, to tell text from other data


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    words = [word for word in (*NUMBERS, TEXT, RAS) if word.startswith(incomplete)]
    return [*map(CompletionItem, words), *RUN.shell_complete(ctx, param, incomplete)]


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("what", nargs=-1, required=True, shell_complete=_complete)
@FORMAT
def explain(what: tuple[str, ...], form: str) -> int:
    """Explain a sign of failure: what it means, whose it is, what to do, and where that is
    documented.

    \b
    chaos explain xid 79                of NVIDIA's driver; several numbers may follow
    chaos explain sxid 20034            of its driver for NVSwitches
    chaos explain signal SIGBUS         or its number
    chaos explain exit 137              of a process; -9 as torchrun writes it
    chaos explain text "NCCL WARN ..."  an error's words
    chaos explain train.log             what a log says, best first; - reads standard input
    chaos explain ras 127.0.0.1:28028   who is dead or lags, by NCCL's RAS; or what ncclras printed
    chaos explain runs/NAME/latest      the incidents of a stored run

    Exit code 1: nothing in the text or log is in the playbook; 2: no such number, file or run.
    """
    kind, words = what[0], what[1:]
    unknown = next((word for word in what if word.startswith("--")), None)
    if unknown and kind != TEXT:
        raise click.UsageError(f"no such option: {unknown}")
    if kind == TEXT and words:
        return _lines(" ".join(words).split("\n"), "the text", form)
    if kind in NUMBERS and words:
        return _numbers(kind, words, form)
    if kind == RAS and len(words) == 1 and not _exists(Path(words[0])):
        return _asked_ras(words[0], form)
    if kind == RAS and len(words) == 1:
        kind, words = words[0], ()
    path = Path(kind)
    if kind in (*NUMBERS, TEXT) and not _exists(path):
        raise click.UsageError(f"{kind!r} needs {'the words' if kind == TEXT else 'a number'}")
    if words:
        raise click.UsageError(
            f"one file or run at a time, or first one of: {', '.join((*NUMBERS, TEXT, RAS))}"
        )
    if kind == STANDARD_INPUT:
        return _lines(_text_of(sys.stdin.buffer, "standard input"), "standard input", form)
    return _run(path, form) if path.is_dir() else _file(path, form)


def _numbers(kind: str, words: Sequence[str], form: str) -> int:
    """Entries by number or name; what has none is said, and is exit code 2."""
    from trainchaos.harness.explain.text import entry_json, entry_lines
    from trainchaos.recovery.playbook.book import playbook

    book = playbook()
    answers = [(word, *_look_up(book, kind, word)) for word in words]
    rows = [
        {"asked": asked, "entry": entry_json(entry), "problem": "" if entry else said}
        for asked, entry, said in answers
    ]
    found = [entry_lines(entry, said) for _, entry, said in answers if entry]
    tell(form, rows, [line for block in found for line in ("", *block)][1:], HANG)
    missing = [said for _, entry, said in answers if entry is None]
    for said in missing:
        say(said, err=True)
    return errors.EXIT_USAGE if missing else errors.EXIT_PASS


def _look_up(book: Playbook, kind: str, word: str) -> tuple[Entry | None, str]:
    """The entry, and how it is called; or None, and why there is none."""
    from trainchaos.recovery.playbook.book import signal_name

    if kind == "signal":
        name = signal_name(word)
        if not name:
            return None, f"there is no signal {word!r}; names are as SIGBUS or BUS, numbers as 7"
        entry = book.by_signal(name)
        return entry, name if entry else f"no entry for {name}"
    number = _whole(word)
    if number is None:
        return None, f"{kind} needs a number, and {word!r} is none"
    if kind == "exit":
        if not -64 <= number <= 255:
            return None, (
                f"{number} is no exit code: they are 0 to 255, or minus the number of a signal"
            )
        entry = book.by_exit_code(number)
        if entry is None:
            return None, f"no entry for exit code {number}: it is the program's own"
        return entry, f"exit code {number}" + (f" ({entry.signal})" if entry.signal else "")
    name, known = ("XID", book.xids) if kind == "xid" else ("SXid", book.sxids)
    entry = book.by_xid(number) if kind == "xid" else book.by_sxid(number)
    if entry is not None:
        return entry, f"{name} {number}"
    near = ", ".join(map(str, sorted(sorted(known, key=lambda n: abs(n - number))[:2])))
    listed = "NVIDIA's catalogue lists" if kind == "xid" else "there are, with gaps,"
    return None, (
        f"no entry for {name} {number}: {listed} {known[0]} to {known[-1]}; the nearest are {near}"
    )


def _run(path: Path, form: str) -> int:
    from trainchaos.harness.explain.account import story_of
    from trainchaos.harness.explain.text import story_json, story_lines
    from trainchaos.harness.host.rundir import open_run

    story = story_of(open_run(path))
    tell(form, story_json(story), story_lines(story), HANG)
    return errors.EXIT_PASS


def _file(path: Path, form: str) -> int:
    from trainchaos.chaos.files import open_regular

    try:
        with open_regular(path, follow=True) as stream:
            return _lines(_text_of(stream, str(path)), str(path), form)
    except OSError as error:
        hint = "explain a log, a run directory, or one of: " + ", ".join((*NUMBERS, TEXT, RAS))
        raise errors.ScenarioError(
            f"{path}: cannot be read: {error.strerror}", hint=hint
        ) from error


def _lines(lines: Iterator[str] | Sequence[str], what: str, form: str) -> int:
    """What lines say. Exit code 1 if the playbook knows none of it."""
    from trainchaos.harness.explain.text import match_json, match_lines
    from trainchaos.recovery.detection import ras_text
    from trainchaos.recovery.playbook.book import match_text
    from trainchaos.recovery.playbook.entry import Tells

    lines = iter(lines)
    head = [*islice(lines, ras_text.LOOKED_AT)]
    lines = chain(head, lines)
    if ras_text.is_answer(head):
        return _ras(ras_text.read_answer(islice(lines, MOST_LINES)), what, form)
    read = 0

    def counted() -> Iterator[str]:
        nonlocal read
        for line in lines:
            read += 1
            yield line

    matches = match_text(counted())
    rows = [match_json(match) for match in matches]
    known = bool(matches) and matches[0].entry.tells is not Tells.EFFECT
    told = match_lines(matches, what, read) if matches else []
    tell(form, {"lines": read, "known": known, "matches": rows}, told, HANG)
    if matches:
        return errors.EXIT_PASS
    why = f"{read} lines, and the playbook knows none of them" if read > 1 else "nothing known"
    say(f"{what}: {why if read else 'is empty'}", err=True)
    return errors.EXIT_FAIL


def _asked_ras(address: str, form: str) -> int:
    from trainchaos.recovery.detection.ras import ask

    return _ras(ask(address), address, form)


def _ras(found: RasFinding, what: str, form: str) -> int:
    """What NCCL's RAS says. Exit code 1 if it complains of nobody."""
    from trainchaos.harness.explain.text import entry_json, entry_lines
    from trainchaos.recovery.playbook.book import playbook

    dead = [one for one in found.missing if one.dead]
    silent = [one for one in found.missing if not one.dead]
    kinds = (("dead", dead), ("missing", silent), ("behind", found.behind))
    entries = {
        name: entry
        for name, ranks in kinds
        if ranks and (entry := playbook().by_id(f"nccl-ras-{name}"))
    }
    rows = {name: [asdict(one) for one in ranks] for name, ranks in kinds}
    told = [entry_json(entry) for entry in entries.values()]
    tree = {"communicators": found.communicators, **rows, "entries": told}
    lines = []
    if said := found.sentences:
        lines = [f"{what}: NCCL's RAS, communicators: {found.communicators}"]
        lines += [f"  {one}" for one in said[:MOST_RANKS]]
        lines += [f"  and {len(said) - MOST_RANKS} more"] if len(said) > MOST_RANKS else []
        for name, entry in entries.items():
            lines += ["", *entry_lines(entry, name)]
    tell(form, tree, lines, HANG)
    if entries:
        return errors.EXIT_PASS
    say(f"{what}: by NCCL's RAS no rank is named as dead, missing or behind", err=True)
    return errors.EXIT_FAIL


def _text_of(stream: BinaryIO, what: str) -> Iterator[str]:
    """Its lines; a carriage return ends one too, as in progress bars. Raises ScenarioError if it
    is no text.
    """
    first = stream.read(LOOKED_AT)
    if b"\0" in first:
        raise errors.ScenarioError(
            f"{what}: is no text, but binary data", hint="unpack it first, as with zcat, and use -"
        )
    rest = first + stream.readline(MOST_AT_ONCE)  # to the end of the line that was cut
    more = iter(partial(stream.readline, MOST_AT_ONCE), b"")
    for chunk in chain((rest,), more):
        yield from chunk.decode(errors="replace").splitlines()


def _whole(word: str) -> int | None:
    digits = word.removeprefix("-")
    short = digits.isascii() and digits.isdigit() and len(digits) < 10
    return int(word) if short else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


COMMANDS = [explain]
