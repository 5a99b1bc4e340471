"""Reports of drivers: the file of them, and which announce a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainchaos.recovery.health.readings import MOST_PROBLEMS, MOST_WORDS, Problems
from trainchaos.recovery.health.signs import (
    MOST_BYTES,
    HealthReport,
    ReportFile,
    announced,
    entry_of,
)
from trainchaos.recovery.playbook.book import playbook


def xid(code: int) -> HealthReport:
    return HealthReport(what="xid", code=code, source="nvml")


@pytest.mark.parametrize(
    ("what", "code", "part"),
    [
        ("xid", 48, "XID 48: An uncorrectable"),
        ("xid", 79, "XID 79: The GPU has fallen off the bus"),
        ("xid", 63, ""),
        ("xid", 94, ""),
        ("xid", 0, ""),
        ("xid", 99999, ""),
        ("ecc", 0, "ecc: An uncorrectable"),
        ("ecc", 3, "ecc: An uncorrectable"),
        ("thermal", 96, ""),
        ("nvlink", 48, ""),
    ],
)
def test_what_announces_a_failure(what: str, code: int, part: str) -> None:
    said = announced(xid(code).model_copy(update={"what": what}))
    assert said.startswith(part) if part else said == ""
    assert entry_of("unheard-of", 48) is None


def test_the_playbook_is_what_is_asked() -> None:
    book = playbook()
    moving = {number for number in book.xids if (entry := book.by_xid(number)) and entry.move}
    assert moving and {number for number in book.xids if announced(xid(number))} == moving


def test_every_reader_has_all_reports(tmp_path: Path) -> None:
    file, one, other = (ReportFile(tmp_path / "h") for _ in range(3))
    assert one.read() == []
    reports = [
        HealthReport(what="xid", code=94, device="cuda:1", rank=1, source="injected"),
        HealthReport(what="thermal", code=91, node=2, source="nvml"),
    ]
    for report in reports:
        file.append(report)
    assert one.read() == other.read() == reports
    assert one.read() == [] and one.problems() == []


def test_a_report_file_may_be_anything(tmp_path: Path) -> None:
    path = tmp_path / "h"
    source = ReportFile(path)
    report = HealthReport(what="ecc", code=1, source="nvml")
    line = report.model_dump_json().encode() + b"\n"
    path.write_bytes(b"\xff\n{}\n[]\nnull\n" + b"x" * (2 * MOST_BYTES) + b"\n" + line)
    assert [one for _ in range(4) for one in source.read()] == [report]
    path.write_bytes(line)  # begun anew
    assert source.read() == [report]
    path.unlink()
    path.mkdir()
    for _ in range(3):
        assert source.read() == []
    assert [one.metric for one in source.problems()] == ["reports"]


def test_problems_are_bounded_in_number_and_length() -> None:
    problems = Problems("x")
    for i in range(MOST_PROBLEMS + 500):
        problems.note(str(i), "", "w" * 10_000)
    said = problems.take()
    assert len(said) == MOST_PROBLEMS
    assert max(len(one.why) for one in said) == MOST_WORDS
