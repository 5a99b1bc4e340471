"""The playbook: every entry is whole, every expression finds its example before any other does, and
no line takes long.
"""

from __future__ import annotations

import re
import signal as signals
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.costs import times_as_long
from trainchaos.recovery.playbook import book
from trainchaos.recovery.playbook.book import PlaybookError, literals
from trainchaos.recovery.playbook.entry import (
    ABOUT,
    LEAVES_THE_DEVICE,
    Action,
    Entry,
    Likelihood,
    Owner,
    Tells,
)

BOOK = book.playbook()
ENTRIES = BOOK.entries
TEXTS = [entry for entry in ENTRIES if entry.pattern]
LONG = 100_000
MOST_TIMES = 20  # by what an ordinary line takes as long: 2.3 today
"""For a line of LONG characters: many times what it takes on a busy machine."""

GOOD = """
[sources]
there = "https://example.org/a"

[[entry]]
id = "one"
xid = [79]
meaning = "It is gone."
cause = "bus"
owner = "hardware"
action = "reboot-node"
sources = ["there"]
"""


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_an_entry_makes_sense(entry: Entry) -> None:
    assert entry.sources and entry.meaning.endswith("."), entry
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.id)
    found_by = (entry.xids, entry.sxids, entry.signal, entry.exits, entry.pattern)
    assert sum(map(bool, found_by)) == 1 and entry.matches
    assert all(source.startswith("https://") for source in entry.sources)
    assert entry.owner is not Owner.UNCLEAR or entry.likelihood is Likelihood.STATED
    assert bool(entry.pattern) == bool(entry.example)
    assert entry.pattern is None or not entry.pattern.search("")
    assert not entry.note or entry.note.endswith((".", "?")), entry.note
    if entry.move:
        assert entry.action in LEAVES_THE_DEVICE
        assert entry.owner is not Owner.APPLICATION


@pytest.mark.parametrize("entry", TEXTS, ids=lambda entry: entry.id)
def test_an_expression_finds_its_example_and_none_outranks_it(entry: Entry) -> None:
    around = ["step 7 loss 2.31", f"[rank3]: 2026-01-01 {entry.example}", "bye"]
    around = [around[0], entry.example, around[2]] if entry.id == "killed" else around
    found = book.match_text(around)
    assert [match.entry.id for match in found] == [entry.id]
    assert (found[0].number, found[0].lines) == (2, 1) and entry.example in found[0].line


@pytest.mark.parametrize("entry", TEXTS, ids=lambda entry: entry.id)
def test_what_is_looked_for_first_is_in_what_an_expression_finds(entry: Entry) -> None:
    assert entry.pattern is not None
    words = literals(entry.pattern.pattern)
    assert words and any(word in entry.example for word in words)


def test_every_xid_that_nvidia_lists_has_an_entry() -> None:
    assert BOOK.xids == tuple(range(1, 173))
    asked = {
        entry.id
        for number in (8, 13, 31, 48, 63, 64, 74, 79, 94, 95, 119)
        if (entry := BOOK.by_xid(number))
    }
    assert len(asked) == 11


@pytest.mark.parametrize("number", BOOK.xids)
def test_an_xid_is_found_in_the_kernels_words(number: int) -> None:
    for line in (
        f"[ 966.5] NVRM: Xid (PCI:0000:5a:00): {number}, pid=42, name=python, Ch 00000008",
        f"NVRM: Xid (0000:03:00): {number}, Channel 00000001",
        f"the driver reported XID {number}",
    ):
        (found,) = book.match_text([line])
        assert found.entry is BOOK.by_xid(number)


@pytest.mark.parametrize("number", BOOK.sxids)
def test_an_sxid_is_no_xid(number: int) -> None:
    line = f"nvidia-nvswitch0: SXid (PCI:0000:c2:00.0): {number}, Fatal, Link 28 LTSSM Fault Up"
    (found,) = book.match_text([line])
    assert found.entry is BOOK.by_sxid(number)
    assert BOOK.by_xid(number) is None


def test_what_warns_is_what_takes_the_device_away() -> None:
    """A corrected error and a contained one do not; neither does a link that was taken down."""
    warns = {number for number in BOOK.xids if (e := BOOK.by_xid(number)) and e.move}
    assert warns == {
        *(46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 156, 158),
    }


@pytest.mark.parametrize(
    ("which", "name"),
    [
        (9, "SIGKILL"),
        ("9", "SIGKILL"),
        ("SIGBUS", "SIGBUS"),
        ("bus", "SIGBUS"),
        (" sigsegv ", "SIGSEGV"),
    ],
)
def test_a_signal_by_number_and_name(which: int | str, name: str) -> None:
    entry = BOOK.by_signal(which)
    assert entry is not None and entry.signal == name


@pytest.mark.parametrize("which", [0, 64000, "SIGNONE", "", "99999999999", "٣", "SIGRTMIN"])
def test_what_is_no_signal_or_has_no_entry(which: int | str) -> None:
    assert BOOK.by_signal(which) is None


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (0, "exit-0"),
        (1, "exit-1"),
        (127, "exit-127"),
        (134, "signal-abrt"),
        (135, "signal-bus"),
        (137, "signal-kill"),
        (139, "signal-segv"),
        (143, "signal-term"),
        (-9, "signal-kill"),
        (-11, "signal-segv"),
        (255, "exit-255"),
    ],
)
def test_an_exit_code(code: int, found: str) -> None:
    entry = BOOK.by_exit_code(code)
    assert entry is not None and entry.id == found


@pytest.mark.parametrize("code", [3, 77, 128, -1000, 254, 256, 10**9])
def test_an_exit_code_of_the_programs_own(code: int) -> None:
    assert BOOK.by_exit_code(code) is None


def test_causes_come_first_then_hints_then_effects() -> None:
    found = book.match_text(
        [
            "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1",
            "RuntimeError: CUDA error: an illegal memory access was encountered",
            "  exitcode  : -6 (pid: 42)",
            "Connection closed by peer [10.0.0.3]:2",
            "NVRM: Xid (PCI:0000:5a:00): 79, GPU has fallen off the bus.",
        ]
    )
    assert [match.entry.id for match in found] == [
        "xid-79",
        "cuda-illegal-access",
        "signal-abrt",
        "gloo-closed",
    ]
    assert [match.number for match in found] == [5, 2, 3, 1]
    assert found[-1].lines == 2


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("  exitcode  : -9 (pid: 4242)", "signal-kill"),
        ("failed (exitcode: -11) local_rank: 0 (pid: 7) of binary: python", "signal-segv"),
        ("srun: error: node1: task 3: Exited with exit code 137", "signal-kill"),
        ("  traceback : Signal 7 (SIGBUS) received by PID 4242", "signal-bus"),
        ("  exitcode  : 1 (pid: 4242)", "exit-1"),
        ("srun: error: node2: task 5: Bus error (core dumped)", "signal-bus"),
        ("srun: error: node2: tasks 1-3: Killed", "signal-kill"),
        ("run.sh: line 12:  8156 Aborted   python train.py", "signal-abrt"),
        ("exits with return code = -7", "signal-bus"),
        ("returned non-zero exit status 245.", "signal-segv"),
        ("      Exit Code:    137", "signal-kill"),
        ("process rank 1 with PID 4 on node a exited on signal 9 (Killed).", "signal-kill"),
        ("subprocess died with <Signals.SIGABRT: 6>.", "signal-abrt"),
        ("store based barrier on rank: 1 (world_size=2, worker_count=4,", "store-leftovers"),
        ("store based barrier on rank: 1 (world_size=4, worker_count=2,", "store-missing"),
        (
            "Indexing.cu:1292: index: block: [0,0,0], thread: [31,0,0] Assertion `i < n` failed.",
            "cuda-device-assert",
        ),
    ],
)
def test_what_programs_print(line: str, found: str) -> None:
    assert [match.entry.id for match in book.match_text([line])] == [found]


@pytest.mark.parametrize(
    "line",
    [
        "step 12 loss 2.31 grad_norm 0.5 lr 0.0003",
        "loss 0.01 info: nothing",
        "grad info is printed every 10 steps",
        "Process finished: exited with exit code 0",
        "  exitcode  : 0 (pid: 4242)",
        "NCCL INFO Connected all rings",
        "python: main.cc:12: void f(): Assertion `x' failed.",
        "EDAC MC0: 0 UE, 0 CE",
        "downloading nvidia-nccl-cu12",
        "Xid",
        "maxid 79",
        "NVRM: Xid (PCI:0000:5a:00): 999, something new",
        "store based barrier on rank: 1 (world_size=4, worker_count=4,",
        "",
        "\x1b[31m\u202e",
    ],
)
def test_ordinary_lines_say_nothing(line: str) -> None:
    assert book.match_text([line]) == []


def test_a_long_log_is_searched_to_its_end() -> None:
    lines = (f"step {step} loss 2.3" for step in range(5000))
    after = ["OSError: [Errno 28] No space left on device", "Killed"]
    found = book.match_text([*lines, *after])
    assert [(match.entry.id, match.number) for match in found] == [
        ("disk-full", 5001),
        ("killed", 5002),
    ]


def test_both_ends_of_a_long_line_are_searched() -> None:
    for line in (
        "CUDA out of memory" + " " * LONG,
        " " * LONG + "CUDA out of memory",
    ):
        (found,) = book.match_text([line])
        assert found.entry.id == "cuda-oom" and len(found.line) < 2 * book.LONGEST_LINE


def ordinary() -> None:
    book.match_text(["a" * LONG])


@pytest.mark.parametrize("entry", TEXTS, ids=lambda entry: entry.id)
def test_no_expression_takes_long(entry: Entry) -> None:
    """A line of what it begins with, again and again: the worst for what looks back."""
    pattern = entry.pattern
    assert pattern is not None
    hostile = [*literals(pattern.pattern), entry.example[:-1], entry.example[1:-4]]
    for part in filter(None, hostile):
        line = (part * (LONG // len(part) + 1))[:LONG]

        def search(line: str = line) -> None:
            book.match_text([line])
            pattern.search(book.shortened(line))

        assert times_as_long(search, ordinary, MOST_TIMES) < MOST_TIMES, part


@pytest.mark.parametrize(
    "part", ["Xid (", "SXid (", "exitcode : ", "exitcode -", "Xid 1", "\n", "a"]
)
def test_no_number_takes_long(part: str) -> None:
    line = part * (LONG // len(part))
    assert times_as_long(lambda: book.match_text([line]), ordinary, MOST_TIMES) < MOST_TIMES


def test_every_action_is_explained() -> None:
    assert set(ABOUT) == set(Action)


# --- the file


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('id = "one"\n', "", "missing required field `id`"),
        ('cause = "bus"', 'cause = "gremlins"', "'gremlins'"),
        ("xid = [79]", "xid = [79]\ncolour = 'red'", "unknown field `colour`"),
        ("xid = [79]", "xid = 79", "Expected `array`"),
        ("xid = [79]", "pattern = 'a('", "unterminated"),
        ('sources = ["there"]', 'sources = ["here"]', "'here'"),
        ("[sources]", "[sources", "damaged"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, old: str, new: str, why: str) -> None:
    assert old in GOOD
    path = tmp_path / "book.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(PlaybookError) as caught:
        book.read_playbook(path)
    assert caught.value.message.startswith(f"{path} is damaged") and why in caught.value.message


def test_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "book.toml"
    path.write_text(GOOD)
    (entry,) = book.read_playbook(path).entries
    assert (entry.xids, entry.move, entry.tells) == ((79,), False, Tells.CAUSE)
    assert entry.likelihood is Likelihood.STATED and entry.blame == "hardware"
    assert entry.sources == ("https://example.org/a",)


def test_no_two_entries_are_looked_up_by_the_same() -> None:
    signs = [sign for entry in ENTRIES for sign in entry.signs]
    assert len({*signs}) == len(signs)
    explained = {name for entry in ENTRIES for name in entry.explains}
    assert explained <= {entry.id for entry in ENTRIES}
    bounds = {"xid": (1, 9999), "sxid": (10_000, 99_999), "exit": (0, 255)}
    for kind, number in signs:
        if kind in bounds:
            assert bounds[kind][0] <= int(number) <= bounds[kind][1]
        elif kind == "signal":
            assert number in signals.Signals.__members__


def test_sources_are_addresses_of_documents() -> None:
    sources = tomllib.loads(book.FILE.read_text())["sources"]
    assert len({*sources.values()}) == len(sources)
    assert {*sources.values()} == {one for entry in ENTRIES for one in entry.sources}


def test_it_is_cheap_to_import_and_needs_nothing_else_of_ours() -> None:
    code = (
        "import sys\nfrom trainchaos.recovery.playbook import book\n"
        "assert not book.playbook.cache_info().currsize\n"
        "book.playbook().by_xid(79)\nassert book.playbook.cache_info().currsize\n"
        "print(*(m for m in sys.modules if m.startswith('trainchaos.')"
        " and not m.startswith('trainchaos.recovery.playbook')))\n"
        "heavy = {'torch', 'pydantic', 'click', 'numpy'} & {*sys.modules}\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = set(done.stdout.split())
    assert found <= {
        f"trainchaos.{name}" for name in ("chaos", "chaos.beacon", "chaos.errors", "recovery")
    }
